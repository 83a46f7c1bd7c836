"""Many at once: all finish, none starves, and what they used is free again afterwards."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from tests.e2e.conftest import CHAT, EMBED, eos_id
from tests.e2e.test_faults import wait_for, workers


async def stream(client: httpx.AsyncClient, url: str, body: dict) -> tuple[str, dict, float]:
    """Text, usage and the longest pause between two frames."""
    text, usage, last, pause = "", {}, time.monotonic(), 0.0
    async with client.stream("POST", url, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line.removeprefix("data: "))
                assert "errors" not in frame, frame
                now = time.monotonic()
                last, pause = now, max(pause, now - last)
                text += frame["response"]
                usage = frame.get("usage", usage)
    return text, usage, pause


def idle(stack) -> bool:
    found = workers(stack)
    return all(
        found[s]["running"] == found[s]["waiting"] == found[s]["used_blocks"] == 0 for s in ("decode", "prefill")
    )


async def test_16_streams_of_mixed_length(stack):
    url = f"{stack.api}/run/{CHAT}"
    bodies = [
        {
            "prompt": f"Request {i}: " + "word " * (i * 17 % 400),
            "max_tokens": 8 + i * 5 % 60,
            "temperature": 0,
            "raw": True,
        }
        for i in range(16)
    ]
    async with httpx.AsyncClient(headers=stack.headers, timeout=300) as client:
        together = await asyncio.gather(*(stream(client, url, body) for body in bodies))
        alone = [await stream(client, url, body) for body in bodies[:4]]
    for body, (_, usage, _) in zip(bodies, together, strict=True):
        assert 0 < usage["completion_tokens"] <= body["max_tokens"]
    # Greedy answers do not depend on the company they are computed in.
    assert [t for t, _, _ in together[:4]] == [t for t, _, _ in alone]
    wait_for(lambda: idle(stack), 60)


async def test_a_burst_of_120_gives_answers_or_429(stack):
    url = f"{stack.api}/run/{CHAT}"
    limits = httpx.Limits(max_connections=120)
    async with httpx.AsyncClient(headers=stack.headers, timeout=300, limits=limits) as client:

        async def one(i: int) -> int:
            answer = await client.post(url, json={"prompt": f"burst {i}", "max_tokens": 4})
            body = answer.json()
            if answer.status_code == 429:
                assert body["errors"][0]["code"] == 3040 and int(answer.headers["retry-after"]) >= 1
            else:
                assert answer.status_code == 200, body
                assert body["result"]["usage"]["completion_tokens"] <= 4
            return answer.status_code

        statuses = await asyncio.gather(*(one(i) for i in range(120)))
    assert statuses.count(200) >= 32 and set(statuses) <= {200, 429}
    wait_for(lambda: idle(stack), 60)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("packets", [1, 2])
async def test_a_client_that_leaves_frees_its_place_at_once(stack, stream, packets):
    """Over a bare socket: whether a proxy sees a client leave may depend on how the body was sent."""
    body = {"prompt": "on and on " * 20, "raw": True, "max_tokens": 3000, "logit_bias": {eos_id(): -100}}
    payload = json.dumps({**body, "stream": stream}).encode()
    url = httpx.URL(f"{stack.api}/run/{CHAT}")
    head = "".join(
        f"{line}\r\n"
        for line in (
            f"POST {url.raw_path.decode()} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {stack.key}",
            f"Content-Length: {len(payload)}",
            "",
        )
    ).encode()
    for seconds in (0.05, 0.3):
        before = workers(stack)["decode"]["generated_tokens"]
        _, writer = await asyncio.open_connection(url.host, url.port)
        if packets == 1:
            writer.write(head + payload)
        else:
            writer.write(head)
            await asyncio.sleep(0.01)
            writer.write(payload)
        await writer.drain()
        await asyncio.sleep(seconds)
        writer.close()
        await writer.wait_closed()
        wait_for(lambda: idle(stack), 60)
        assert workers(stack)["decode"]["generated_tokens"] - before < body["max_tokens"]


@pytest.mark.slow
async def test_who_cannot_wait_is_refused_while_long_answers_hold_all_places(stack):
    """At once, and with the time until one ends: none of them has ended when the refusal is there."""
    url = f"{stack.api}/run/{CHAT}"
    long = {"prompt": "on and on", "raw": True, "max_tokens": 3000, "logit_bias": {eos_id(): -100}}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=stack.headers, timeout=600, limits=limits) as client:
        streams = [asyncio.ensure_future(stream(client, url, {**long, "prompt": f"on and on {n}"})) for n in range(60)]
        try:

            def full() -> bool:
                found = workers(stack)
                return (
                    found["decode"]["running"] >= 32 and found["decode"]["running"] + found["prefill"]["running"] >= 48
                )

            await asyncio.to_thread(wait_for, full, 120)
            for options in ({"rejectIfBusy": True}, {"deadlineMs": 1000}):
                answer = await client.post(url, json={"prompt": "now", "max_tokens": 4, "options": options})
                if len(workers(stack)["decode"]["pids"]) > 1:
                    pytest.skip("the autoscaler was faster, and there are places again")
                assert answer.status_code == 429, answer.text
                assert int(answer.headers["retry-after"]) >= 1 and answer.json()["errors"][0]["code"] == 3040
            assert not any(one.done() for one in streams)
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    wait_for(lambda: idle(stack), 60)


@pytest.mark.slow
async def test_reject_if_busy(stack):
    """Who asks again and again, more of them than there are places, is refused some time and let in some time."""
    url = f"{stack.api}/run/{CHAT}"
    told: dict[int, list[httpx.Response]] = {200: [], 429: []}
    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(headers=stack.headers, timeout=300, limits=limits) as client, asyncio.timeout(120):

        async def ask_again_and_again(number: int) -> None:
            body = {"prompt": f"busy {number}", "max_tokens": 32, "options": {"rejectIfBusy": True}}
            while not all(told.values()):
                answer = await client.post(url, json=body)
                told[answer.status_code].append(answer)

        await asyncio.gather(*(ask_again_and_again(number) for number in range(120)))
    assert all(a.json()["errors"][0]["code"] == 3040 for a in told[429])
    wait_for(lambda: idle(stack), 60)


async def test_a_large_embedding_call_does_not_hold_up_a_small_one(stack):
    url = f"{stack.api}/run/{EMBED}"
    async with httpx.AsyncClient(headers=stack.headers, timeout=120) as client:
        large = asyncio.create_task(
            client.post(url, json={"text": [f"a sentence about number {i}" * 4 for i in range(700)]})
        )
        await asyncio.sleep(0.1)
        small = await client.post(url, json={"text": "hello"})
        assert small.status_code == 200 and not large.done()
        assert (await large).json()["result"]["shape"] == [700, 384]
