"""Two gateways before two prefill and two decode workers, as a small cluster has them: whatever is killed while mixed
traffic runs, answers are those of transformers, each is in the ledger once, and nothing is held in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.pair.client import Client, text
from tests.e2e.pair.deployment import Pair, Shape, deployed
from tests.e2e.pair.test_gateways import kill, owner_first, process_of
from tests.e2e.pair.traffic import TOKENS, Traffic, entries, held, known_asks, ledger_problem, metrics
from tests.waiting import until

pytestmark = pytest.mark.slow
CLIENTS = 10
COUNTS = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
LOST = ("decode", "prefill", "guest", "owner")
PROMPTS = 14
FOUR = Shape("four", decode=2, prefill=2)


@pytest.fixture(scope="module")
def pair(stack, tmp_path_factory) -> Iterator[Pair]:
    with deployed(stack, tmp_path_factory.mktemp("four"), FOUR) as running:
        yield running


def seeds(what: str) -> range:
    """Of prompts that no other test has asked."""
    first = PROMPTS * LOST.index(what)
    return range(first, first + PROMPTS)


def all_told(pair: Pair) -> dict[str, dict]:
    return {gateway: pair.status(gateway) for gateway in pair.gateways()}


async def until_nothing_is_held(pair: Pair) -> None:
    """At both gateways, by what each of them tells, and in the engines."""

    async def look() -> bool:
        told = await asyncio.to_thread(all_told, pair)
        whole = all(len(one["workers"]) == pair.shape.workers and not one["silent"] for one in told.values())
        last.append({gateway: held(one) for gateway, one in told.items()})
        return len(told) == 2 and whole and not any(last[-1].values())

    last: list[dict] = []
    try:
        await until(look, 90)
    except TimeoutError:
        raise AssertionError(f"still held: {last[-1:]}") from None


async def agree(pair: Pair) -> float:
    """Both tell of the same owner of the dispatch, who is one of them, of the same workers and of the same counts.
    Returns how many requests have ended since they started.
    """
    one, other = (await asyncio.to_thread(all_told, pair)).values()
    assert one["routing"]["owner"] == other["routing"]["owner"]
    assert sorted(told["routing"]["plan"]["why"] == "another gateway plans" for told in (one, other)) == [False, True]
    for told in (one, other):
        assert told["ready"]
    roles = [{w["replica"]: (w["stage"], w["role"]) for w in told["routing"]["workers"]} for told in (one, other)]
    assert roles[0] == roles[1] and len(roles[0]) == pair.shape.workers
    engines = [{(w["stage"], w["pid"]) for w in told["workers"]} for told in (one, other)]
    assert engines[0] == engines[1]
    stages = sorted(stage for stage, _ in engines[0])
    assert stages == ["decode"] * pair.shape.decode + ["prefill"] * pair.shape.prefill

    for gateway in pair.gateways():
        health = httpx.get(f"{gateway}/health", timeout=60)
        assert health.status_code == 200 and health.json()["models"][pair.shape.model] == {
            "ready": True,
            "state": "running",
        }

    async def same() -> bool:
        counted.append([await asyncio.to_thread(metrics, pair, gateway) for gateway in pair.gateways()])
        # A second's counts are added once it is over. Each request is counted once, and each has as many tokens.
        sums = {tuple(each.get(name) for name in COUNTS) for each in counted[-1]}
        return len(sums) == 1 and all(each[COUNTS[1]] == each[COUNTS[0]] * TOKENS for each in counted[-1])

    counted: list[list[dict[str, float]]] = []
    try:
        await until(same, 30)
    except TimeoutError:
        raise AssertionError(f"the gateways expose {[[e[n] for n in COUNTS] for e in counted[-1]]}") from None
    for each in counted[-1]:
        assert each["vllm:num_requests_running"] == each["vllm:num_requests_waiting"] == 0
    return counted[-1][0]["vllm:request_success_total"]


async def events_of(client: Client, gateway: str, request: str) -> list[dict]:
    answer = await client.http.get(f"{gateway}/v1/requests/{request}")
    # What ended last before a gateway was killed may not have been written down but in the ledger.
    return answer.json()["events"] if answer.status_code == 200 else []


async def lose(pair: Pair, what: str, gateways: list[str], traffic: Traffic) -> None:
    """Kills one, and returns once another has taken its place."""
    if what in ("decode", "prefill"):

        async def busy() -> int | None:
            """One that decodes; whatever it does where the other stage is meant, whose work is short."""
            workers = [w for w in await asyncio.to_thread(lambda: pair.workers) if w["stage"] == what]
            running, pid = max((worker["running"], worker["pid"]) for worker in workers)
            return pid if running or what == "prefill" else None

        pid = await until(busy)
        await kill(pid)

        async def replaced() -> bool:
            pids = {worker["pid"] for worker in await asyncio.to_thread(lambda: pair.workers)}
            return len(pids) == pair.shape.workers and pid not in pids

        await until(replaced, 120)
    else:
        owner, guest = await owner_first(pair, gateways)
        lost, stays = (owner, guest) if what == "owner" else (guest, owner)
        traffic.may_break = lost
        traffic.gateways = [lost, stays]
        process = process_of(lost)
        await until(lambda: traffic.streaming >= 2)
        await kill(process)
        traffic.gateways = [stays]
        await until(lambda: lost not in pair.gateways() and len(pair.gateways()) == 2, 120)
        traffic.gateways = pair.gateways()
    await asyncio.to_thread(pair.wait_ready)


@pytest.mark.parametrize("what", LOST)
async def test_one_is_lost_under_mixed_traffic(pair, gateways, clients, what):
    client = await clients()
    asks = await asyncio.to_thread(known_asks, FOUR.model, seeds(what))
    for gateway in gateways:
        assert text(await client.ask(gateway, asks[0].body)) == asks[0].text
    await until_nothing_is_held(pair)
    counted, before = await agree(pair), {entry.id for entry in entries(pair)}

    traffic = Traffic(client, asks, gateways)
    asking = [asyncio.create_task(traffic.ask_again_and_again(number)) for number in range(CLIENTS)]

    async def answered(more: int) -> None:
        """Until so many more answers are there; a client that was told something wrong ends this at once."""
        since = traffic.answers
        await until(lambda: traffic.answers >= since + more or any(task.done() for task in asking), 180)

    try:
        await answered(2 * CLIENTS)
        losing = asyncio.create_task(lose(pair, what, gateways, traffic))
        await asyncio.wait([losing, *asking], return_when=asyncio.FIRST_COMPLETED)
        if losing.done():
            await losing
            await answered(4 * CLIENTS)
    finally:
        traffic.over = True
        await asyncio.wait_for(asyncio.gather(*asking), 120)
    assert {"whole", "session", "stream", "resumable"} <= set(traffic.counts), traffic.counts
    if what in ("guest", "owner"):
        assert traffic.broken.total() + traffic.counts["gone on"] > 0
    else:
        assert not traffic.broken

    await until_nothing_is_held(pair)
    now = await agree(pair)
    if what in ("decode", "prefill"):
        assert now - counted == len(traffic.ended) + len(client.resumable)

    async def booked() -> bool:
        problems.append(await asyncio.to_thread(ledger_problem, pair, traffic, before))
        return problems[-1] is None

    problems: list[str | None] = []
    events = [event for request in traffic.ended for event in await events_of(client, pair.gateways()[0], request)]
    assert any(event["event"] == "decoded" and event["prefilled"] for event in events)
    if what == "decode":
        assert any(event["event"] == "worker lost" for event in events)
    try:
        await until(booked, 60)
    except TimeoutError:
        raise AssertionError(problems[-1]) from None
