"""A worker tells gateways what its node's pool has let go, and that there is another pool."""

from __future__ import annotations

import asyncio

from serve_app.kv.news import PoolNews
from serve_app.wire.load import KEY_BYTES, MAX_EVICTED, Pool
from serve_app.worker import pool_watch
from serve_app.worker.pool_watch import PoolWatch


class FakeClient:
    """Answers with what the test puts in; an exception is raised."""

    def __init__(self) -> None:
        self.news_of: asyncio.Queue[PoolNews | Exception] = asyncio.Queue()
        self.asked: list[int] = []

    async def news(self, since: int, wait_s: float) -> PoolNews:
        self.asked.append(since)
        found = await self.news_of.get()
        if isinstance(found, Exception):
            raise found
        return found

    def tokens(self, nbytes: int) -> int:
        return nbytes // 10


def names(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "little") for n in numbers]


async def test_it_tells_of_evictions_and_of_another_pool(monkeypatch) -> None:
    monkeypatch.setattr(pool_watch, "AGAIN_S", 0.001)
    client, changes = FakeClient(), []
    watch = PoolWatch(client)  # type: ignore[arg-type]
    assert watch.take() == Pool()
    watch.start(lambda: changes.append(watch.take().incarnation))

    async def hear(*news: PoolNews | Exception) -> None:
        asked = len(client.asked)
        for one in news:
            client.news_of.put_nowait(one)
        async with asyncio.timeout(20):
            while len(client.asked) < asked + len(news):
                await asyncio.sleep(0.001)

    # There is none yet; then there is.
    await hear(ValueError("no actor"), PoolNews("a", 500, 7, []))
    assert changes == ["a"] and watch.take() == Pool("a", 50)
    await hear(PoolNews("a", 500, 9, names(1, 2)))
    told = b"".join(name[:KEY_BYTES] for name in names(1, 2))
    assert watch.take().evicted == told == watch.take().evicted
    await hear(PoolNews("a", 500, 10, names(3)))
    watch.take()
    watch.sent()
    assert watch.take().evicted == b""
    # More than a report takes; and what the next pool has not is another matter.
    await hear(PoolNews("a", 500, 400, names(*range(MAX_EVICTED + 1))))
    assert len(watch.take().evicted) == MAX_EVICTED * KEY_BYTES
    await hear(RuntimeError("lost"), PoolNews("b", 800, 0, []))
    assert changes == ["a", "b"] and watch.take() == Pool("b", 80)
    assert client.asked == [-1, -1, 7, 9, 10, 400, 400, 0]
    watch.close()


async def test_keys_that_are_dropped_while_a_report_is_on_its_way_are_not_taken_for_others(monkeypatch) -> None:
    monkeypatch.setattr(pool_watch, "WAITING", 4)
    client = FakeClient()
    watch = PoolWatch(client)  # type: ignore[arg-type]
    watch.start(lambda: None)
    client.news_of.put_nowait(PoolNews("a", 500, 1, []))
    client.news_of.put_nowait(PoolNews("a", 500, 2, names(1, 2)))
    async with asyncio.timeout(20):
        while len(client.asked) < 3:
            await asyncio.sleep(0.001)
        assert watch.take().evicted
        client.news_of.put_nowait(PoolNews("a", 500, 3, names(3, 4, 5, 6)))
        while len(client.asked) < 4:
            await asyncio.sleep(0.001)
    watch.sent()
    assert watch.take().evicted == b"".join(name[:KEY_BYTES] for name in names(3, 4, 5, 6))
    watch.close()
