"""Two gateways behind one Serve: who is asked makes no difference, and the loss of one none to the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.serving.processes import descendants
from tests.e2e.pair.client import Client, body, text
from tests.e2e.pair.deployment import MODEL, SLOTS, Pair
from tests.e2e.test_faults import wait_for
from tests.variants import some

LONG = 1900
# Requests of the hostile tenant, in equal parts at both gateways, and of the light one at one of them.
MANY, FEW = 80, 24


async def until_idle(pair: Pair) -> None:
    await asyncio.to_thread(wait_for, lambda: pair.idle, 90)


@contextlib.asynccontextmanager
async def flood(client: Client, gateways: list[str], under_way: int, tokens: int) -> AsyncIterator[None]:
    """Always as many requests under way at each of the gateways until the block ends; then their clients leave."""
    numbers = itertools.count(1000)

    async def ask_again_and_again(gateway: str) -> None:
        while True:
            text(await client.ask(gateway, body(next(numbers), tokens)))

    asking = [asyncio.create_task(ask_again_and_again(g)) for g in gateways for _ in range(under_way)]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended


async def test_both_serve_what_comes_through_the_proxy(pair, gateways, clients):
    client = await clients()
    before = [pair.status(g)["routing"]["placed"] for g in gateways]
    answers = await asyncio.gather(*(client.ask(pair.url, body(1, 24)) for _ in range(24)))
    assert len({text(a) for a in answers}) == 1
    placed = [pair.status(g)["routing"]["placed"] - b for g, b in zip(gateways, before, strict=True)]
    assert sum(placed) == 24 and all(placed), placed


async def test_one_of_them_gives_the_turns_of_both(pair, gateways, clients):
    client = await clients()

    def told() -> list[tuple[bool, int, int]]:
        found = [pair.status(gateway)["routing"] for gateway in gateways]
        planning = [one["plan"]["why"] != "another gateway plans" for one in found]
        return [(p, o["placed_by_owner"], o["placed_for_others"]) for p, o in zip(planning, found, strict=True)]

    before = told()
    async with asyncio.timeout(180):
        while True:
            answers = await asyncio.gather(*(client.ask(gateway, body(n, 2)) for n in range(4) for gateway in gateways))
            assert all(text(answer) for answer in answers)
            changed = [
                (planning, had - had_before, gave - gave_before)
                for (planning, had, gave), (_, had_before, gave_before) in zip(told(), before, strict=True)
            ]
            # The one that plans is who is asked; the other may need a moment to reach it.
            if all((gave if planning else had) > 0 for planning, had, gave in changed):
                break
    assert sorted(planning for planning, _, _ in changed) == [False, True]


async def test_paths_and_responses_are_found_at_either(pair, gateways, clients):
    one, other = await clients(), await clients("other")
    for first, second in (gateways, gateways[::-1]):
        answer = await one.ask(first, body(2, 8))
        # At once: it may not even have been written down.
        paths = [await one.path(g, answer) for g in (second, first)]
        assert paths[0] == paths[1] and paths[0]["done"]["completion_tokens"] == 8
        foreign = await other.http.get(f"{second}/v1/requests/{answer.headers['cf-ray']}")
        assert foreign.status_code == 404
        question = {"model": MODEL, "input": "What does math.sqrt do?", "temperature": 0, "max_output_tokens": 24}
        stored = (await one.http.post(f"{first}/v1/responses", json=question)).json()
        assert await one.found(f"{second}/v1/responses/{stored['id']}") == stored
        assert (await other.http.get(f"{second}/v1/responses/{stored['id']}")).status_code == 404
        follow = {**question, "input": "And json.dumps?", "previous_response_id": stored["id"]}
        turns = [(await one.http.post(f"{g}/v1/responses", json=follow)).json() for g in (first, second)]
        assert turns[0]["output"][0]["content"] == turns[1]["output"][0]["content"]
        assert turns[0]["usage"]["input_tokens"] == turns[1]["usage"]["input_tokens"] > stored["usage"]["total_tokens"]
        assert (await one.http.delete(f"{second}/v1/responses/{stored['id']}")).status_code == 200
        assert (await one.http.get(f"{first}/v1/responses/{stored['id']}")).status_code == 404


async def test_a_key_that_one_revokes_is_refused_by_both(pair, gateways, clients):
    client = await clients()
    tokens = "/client/v4/user/tokens"
    policy = {"effect": "allow", "permission_groups": [{"id": "read"}]}
    made = await client.http.post(gateways[0] + tokens, json={"name": "x", "policies": [policy]})
    bearer = {"Authorization": f"Bearer {made.json()['result']['value']}"}

    async def until(status: int, gateway: str) -> None:
        async with asyncio.timeout(60):
            while (await client.http.get(f"{gateway}/v1/models", headers=bearer)).status_code != status:
                await asyncio.sleep(0.05)

    await until(200, gateways[1])
    assert (await client.ask(gateways[1], body(1, 4), **bearer)).status_code == 403
    gone = await client.http.delete(f"{gateways[1]}{tokens}/{made.json()['result']['id']}")
    assert gone.status_code == 200
    # Where it is revoked at once, at the other by its next look at the store.
    assert (await client.http.get(f"{gateways[1]}/v1/models", headers=bearer)).status_code == 401
    await until(401, gateways[0])


async def test_a_session_meets_the_same_worker_at_either(pair, gateways, clients):
    client = await clients()
    await until_idle(pair)
    for number in range(6):
        session = f"session {number}"
        asked = body(100 + number, 2, prompt=f"Number {number}: " + "say it again " * 30)
        paths = []
        for gateway in gateways if number % 2 else gateways[::-1]:
            answer = await client.ask(gateway, asked, **{"x-session-affinity": session})
            paths.append(await client.path(gateway, answer))
        keyed = await client.ask(gateways[0], {**asked, "prompt_cache_key": session})
        paths.append(await client.path(gateways[0], keyed))

        assert {p["routed"]["why"] for p in paths} == {"session"}
        assert len({p["decoded"]["replica"] for p in paths}) == 1, paths
        # What the one gateway had computed there, the other finds there.
        assert [p["decoded"]["own"] for p in paths[1:]] == [paths[1]["received"]["prompt_tokens"] // 32 * 32] * 2


@pytest.mark.slow
async def test_what_is_sent_to_a_worker_stays_within_its_places(pair, gateways, clients):
    client = await clients()
    most: Counter[str] = Counter()
    async with flood(client, gateways, 5 * SLOTS, 100):
        start = client.done
        # Both are full, and looked at while they are: all places are given again and again.
        async with asyncio.timeout(120):
            while client.done - start < 4 * SLOTS or most["running"] < SLOTS or most["queued"] < SLOTS:
                for gateway in gateways:
                    told = await asyncio.to_thread(pair.status, gateway)
                    most["queued"] = max(most["queued"], sum(told["routing"]["waiting"].values()))
                    for worker in told["workers"]:
                        most["running"] = max(most["running"], worker["running"])
                        most["sent"] = max(most["sent"], worker["running"] + worker["waiting"])
    # Each keeps to the places there are and to what ends within moments, whatever it hears late of the other.
    assert most["sent"] <= 3 * SLOTS, most
    await until_idle(pair)


@pytest.mark.slow
async def test_a_tenant_has_one_share_over_both(pair, gateways, clients):
    light, hostile = await clients("light"), await clients("hostile")
    asked = [hostile.ask(g, body(2000 + n, 40)) for n in range(MANY // 2) for g in gateways]
    asked += [light.ask(gateways[1], body(3000 + n, 40)) for n in range(FEW)]
    answers = await asyncio.gather(*asked)
    askers = [hostile] * MANY + [light] * FEW
    turns = await asyncio.gather(*(one.turn(gateways[1], a) for one, a in zip(askers, answers, strict=True)))
    # By the gateways' clocks, as this process may be held up: while the light tenant had requests waiting.
    begin, end = max(arrived for arrived, _ in turns[MANY:]), max(placed for _, placed in turns[MANY:])
    passed, served = (sum(begin < placed <= end for _, placed in part) for part in (turns[:MANY], turns[MANY:]))
    # Were each gateway to count for itself, the hostile one would have all of the first and half of the second: 3 to 1.
    assert served > 8 and passed < 2 * served, f"{passed} of the hostile tenant's to {served} of the light one's"
    await until_idle(pair)


async def test_clients_that_leave_one_free_the_engine_for_the_other(pair, gateways, clients):
    client = await clients()
    alone = text(await client.ask(gateways[1], body(3, 24)))
    await until_idle(pair)
    made = sum(w["generated_tokens"] for w in pair.workers)
    begun = asyncio.Event()
    leaving = [asyncio.create_task(client.stream(gateways[0], body(10 + n, LONG), begun)) for n in range(2 * SLOTS)]
    await asyncio.wait_for(begun.wait(), 60)
    waiting = asyncio.create_task(client.ask(gateways[1], body(3, 24)))
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert text(await waiting) == alone
    await until_idle(pair)
    assert sum(w["generated_tokens"] for w in pair.workers) - made < 2 * SLOTS * LONG


@pytest.mark.slow
async def test_the_loss_of_one_is_none_to_the_other(pair, gateways, clients):
    client = await clients()
    await until_idle(pair)
    asked, pid = body(4, 150), process_of(gateways[0])
    alone = await client.stream(gateways[1], asked)

    async def ask_until_lost() -> httpx.TransportError:
        try:
            while True:
                text(await client.ask(gateways[0], body(4, LONG)))
        except httpx.TransportError as error:
            return error

    lost = [asyncio.create_task(ask_until_lost()) for _ in range(2)]
    begun = [asyncio.Event() for _ in range(2)]
    kept = [asyncio.create_task(client.stream(gateways[1], asked, event)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60)
    await kill(pid)

    async def ask_as_clients_do() -> str:
        async with asyncio.timeout(60):
            while True:
                # The proxy may have yet to learn that a connection was closed, and send it to the dead one.
                with contextlib.suppress(httpx.RemoteProtocolError):
                    return await client.stream(pair.url, asked)

    fresh = await asyncio.gather(*(ask_as_clients_do() for _ in range(4)), return_exceptions=True)
    assert await asyncio.gather(*kept) == [alone] * 2
    await asyncio.gather(*lost)
    assert fresh == [alone] * 4
    # Another takes its place, and what it was sent has left the engines.
    assert gateways[1] in await asyncio.to_thread(pair.wait_ready)
    await until_idle(pair)


@pytest.mark.slow
async def test_a_gateway_that_comes_changes_nothing_for_streams(pair, gateways, clients):
    """It takes the place of one that is killed; whoever owns the dispatch, streams of the other go on all the while."""
    client = await clients()
    for owner_stays in (True, False):
        await until_idle(pair)
        stays, goes = (await owner_first(pair, await asyncio.to_thread(pair.wait_ready)))[:: 1 if owner_stays else -1]
        asked = [body(5000 + n, 120) for n in range(2 * SLOTS)]
        alone = await asyncio.gather(*(client.stream(stays, one) for one in asked))
        over, answered = asyncio.Event(), Counter[int]()

        async def ask_again(number: int, stays=stays, asked=asked, alone=alone, over=over, answered=answered) -> None:
            while not over.is_set():
                assert await client.stream(stays, asked[number]) == alone[number]
                answered[number] += 1

        asking = [asyncio.create_task(ask_again(n)) for n in range(2 * SLOTS)]
        await kill(process_of(goes))
        now = await asyncio.to_thread(pair.wait_ready)
        before = answered.total()
        async with asyncio.timeout(120):
            while answered.total() < before + 4 * SLOTS and not any(task.done() for task in asking):
                await asyncio.sleep(0.05)
        over.set()
        await asyncio.gather(*asking)
        assert stays in now and goes not in now
    await until_idle(pair)


@pytest.mark.parametrize("streams", some([16, 64], 16))
async def test_streams_go_on_at_the_other_when_the_owner_of_the_dispatch_is_killed(pair, gateways, clients, streams):
    client = await clients()
    await until_idle(pair)
    gateways = await owner_first(pair, gateways)
    adapters = [{}, {"lora": "pirate"}, {"lora": "json"}]
    asked, pid = [body(4000 + n, 60, **adapters[n % 3]) for n in range(6)], process_of(gateways[0])
    async with asyncio.timeout(60):  # a gateway makes those of the record known once it runs
        for gateway, more in itertools.product(gateways, adapters):
            while (await client.ask(gateway, body(0, 1, **more))).status_code == 404:
                await asyncio.sleep(0.1)
    alone = await asyncio.gather(*(client.stream(gateways[1], one) for one in asked))
    begun = [asyncio.Event() for _ in range(streams)]
    reading = [
        asyncio.create_task(client.resumed(gateways, asked[n % len(asked)], event)) for n, event in enumerate(begun)
    ]
    async with asyncio.timeout(60):
        # Some have ended, some are in the middle and some have yet to begin.
        while sum(event.is_set() for event in begun) < streams // 5:
            await asyncio.sleep(0.01)
    await kill(pid)
    async with asyncio.timeout(120):
        found = await asyncio.gather(*reading)
    assert [text for text, _ in found] == [alone[n % len(asked)] for n in range(streams)]
    assert sum(lost for _, lost in found) > 0
    assert gateways[1] in await asyncio.to_thread(pair.wait_ready)
    await until_idle(pair)


async def owner_first(pair: Pair, gateways: list[str]) -> list[str]:
    """The gateway that plans roles and gives all turns, and the other."""

    async def plans(gateway: str) -> bool:
        told = await asyncio.to_thread(pair.status, gateway)
        return told["routing"]["plan"]["why"] != "another gateway plans"

    [owner] = [gateway for gateway in gateways if await plans(gateway)]
    return [owner, next(gateway for gateway in gateways if gateway != owner)]


async def kill(pid: int) -> None:
    """Returns when it has ended."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), 60)
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


def process_of(gateway: str) -> int:
    """The gateway replica that listens at an address."""
    inodes = set()
    with open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and int(local.split(":")[1], 16) == httpx.URL(gateway).port:
                inodes.add(f"socket:[{inode}]")
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            held = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
            if held & inodes:
                return pid
    raise AssertionError(f"nobody listens at {gateway}")
