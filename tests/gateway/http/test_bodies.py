"""A body is read once: parsed and looked through in one walk, large ones beside the event loop."""

from __future__ import annotations

import asyncio
import gzip
import threading
import tracemalloc
from typing import Any

import pytest

from serve_app.api.errors import BodyTooLarge, InvalidInput
from serve_app.api.fields import body as bodies
from serve_app.gateway.http import bodies as http_bodies
from tests.tasks.conftest import ACCOUNT, serve  # noqa: F401
from tests.tasks.test_settle import CHAT, EMBED, RERANK, EchoBackend, encoded

SMALL = {"role": "user", "content": "one two"}
REQUESTS = [
    (f"{ACCOUNT}/run/{CHAT}", {"messages": [SMALL]}),
    (f"{ACCOUNT}/run", {"model": CHAT, "input": {"messages": [SMALL]}}),
    ("/v1/chat/completions", {"model": CHAT, "messages": [SMALL]}),
    ("/v1/completions", {"model": CHAT, "prompt": "one two"}),
    ("/v1/responses", {"model": CHAT, "input": "one two"}),
    ("/v1/messages", {"model": CHAT, "messages": [SMALL], "max_tokens": 9}),
    ("/v1/embeddings", {"model": EMBED, "input": "one two"}),
    (f"{ACCOUNT}/run/{EMBED}", {"text": "one two"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_body_is_walked_once(serve, monkeypatch, path, body) -> None:  # noqa: F811
    walks: list[int] = []
    check = bodies.check_object

    def counted(value: Any) -> Any:
        walks.append(threading.get_ident())
        return check(value)

    async with serve(encoded, models=(CHAT, EMBED)) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        monkeypatch.setattr(bodies, "check_object", counted)
        assert (await served.http.post(path, json=body)).status_code == 200
        assert walks == [threading.get_ident()]  # small: where it is
        walks.clear()
        padded = {**body, "metadata": {}, "ignored": ["x" * 100] * (http_bodies.INLINE_BYTES // 100)}
        assert (await served.http.post(path, json=padded)).status_code == 200
        assert len(walks) == 1 and walks[0] != threading.get_ident()  # large: beside the loop


async def test_the_loop_goes_on_beside_ten_megabytes_of_numbers(serve, monkeypatch) -> None:  # noqa: F811
    ticks = during = 0
    parse = http_bodies.parse_body

    def told(raw: bytes, **more: Any) -> Any:
        nonlocal during
        before = ticks
        try:
            return parse(raw, **more)
        finally:
            during = ticks - before

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with serve(encoded, models=(EMBED,), max_embedding_body_bytes=10_000_000) as served:
        monkeypatch.setattr(http_bodies, "parse_body", told)
        ticking = asyncio.ensure_future(tick())
        body = b'{"text": [' + b"1.5," * 900_000 + b"[2]" + b"]}"
        answer = await served.http.post(f"{ACCOUNT}/run/{EMBED}", content=body)
        ticking.cancel()
        assert answer.status_code == 400 and "text must have at most" in answer.text
        assert during >= 3


async def test_gzip_is_read_within_bounds_and_nothing_else_is(serve) -> None:  # noqa: F811
    body = b'{"query": "one", "contexts": [{"text": "two"}]}'
    packed = gzip.compress(b'{"query": "' + b" " * 5_000_000 + b'"}')
    async with serve(encoded, models=(RERANK,), max_embedding_body_bytes=100_000) as served:

        async def post(content: bytes, encoding: str) -> tuple[int, str]:
            headers = {"Content-Encoding": encoding}
            answer = await served.http.post(f"{ACCOUNT}/run/{RERANK}", content=content, headers=headers)
            return answer.status_code, answer.text

        for encoding in ("gzip", "GZIP", "x-gzip"):
            assert (await post(gzip.compress(body), encoding))[0] == 200
        assert (await post(body, "identity"))[0] == 200
        for encoding in ("br", "zstd", "deflate", "gzip, gzip"):
            status, said = await post(body, encoding)
            assert status == 415 and encoding in said and "gzip" in said
        assert len(packed) < 100_000
        status, said = await post(packed, "gzip")
        assert status == 413 and "100000 bytes" in said
        for broken in (body, packed[:-9], gzip.compress(body)[:-1], gzip.compress(body) * 2, b""):
            status, said = await post(broken, "gzip")
            assert (status, "gzip" in said) in ((400, True), (413, False))


def test_unpacking_stops_at_the_limit(monkeypatch) -> None:
    """However little a bomb is, no more than the limit of it ever lies in memory."""
    packed = gzip.compress(b" " * 5_000_000)
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        http_bodies.unzipped(packed, 100_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_body_holds_so_many_values_and_no_more() -> None:
    for values in (b"1," * 1_000_000, b"{}," * 1_000_001, b'"",' * 1_000_001, b"1.5," * 1_000_001):
        with pytest.raises(InvalidInput, match="more than 1000000 values"):
            bodies.parse_body(b'{"a": [' + values + b"1]}")
    assert len(bodies.parse_body(b'{"a": [' + b"1," * 999_990 + b"1]}")["a"]) == 999_991


def test_one_wrong_value_among_many_is_found() -> None:
    for wrong, words in ((float("inf"), "finite"), ("\ud800", "surrogate"), ({1: 2}, "keys")):
        for others in (1, 1.5, "x", None):
            with pytest.raises(InvalidInput, match=words):
                bodies.check_object({"a": [others] * 1000 + [wrong]})
