"""A worker and two gateways: what tenants were served by way of the other, and whose wish it follows."""

from __future__ import annotations

import asyncio

import ray

from serve_app.channel.served import gateway_name
from serve_app.kv.keys import tenant_id
from serve_app.wire.replicas import Listen
from tests import tiny
from tests.deployments import workers
from tests.deployments.workers import SALT, Caller
from tests.waiting import until


async def test_two_gateways_hear_the_same_of_one_tenant(ray_cluster, tmp_path):
    worker = workers.start(tiny.write_checkpoint(tmp_path / "tiny", "llama"), "decode")
    async with Caller() as one, Caller() as two, asyncio.timeout(400):
        for caller in (one, two):
            await worker.subscribe(Listen(caller.address, 600, "r", "decode"))
        prompt = list(range(3, 103))
        tokens, _ = await one.generate(worker, prompt, max_tokens=20)
        again, result = await one.generate(worker, prompt, max_tokens=20)
        assert tokens == again and len(tokens) == 20
        cached = result.cached
        assert cached >= 64
        expected = (gateway_name(one.address), tenant_id(SALT).hex(), "realtime", 200 - cached, cached, 40)
        for caller in (one, two):
            while not any(entry[1:] == expected for r in caller.reports for entry in r.served):
                await asyncio.sleep(0.05)

        async def told(role: str, planner: Caller) -> None:
            """Until both have heard of it. What follows may have come by then."""
            wish = (role, gateway_name(planner.address))
            for caller in (one, two):
                await until(lambda caller=caller: wish in [(r.role, r.planner) for r in caller.reports])

        # Which of the two counts is drawn from the model's name and theirs.
        both = await until(lambda: next((r for r in reversed(two.reports) if r.gateways == 2), None))
        first, second = (one, two) if both.planner == gateway_name(one.address) else (two, one)
        await told("decode", first)
        for caller, wish in ((second, "mixed"), (first, "prefill")):
            await worker.subscribe(Listen(caller.address, 600, "r", "decode", wish))
        await told("prefill", first)
        await worker.subscribe(Listen(first.address, 0.1, "r", "decode", "prefill"))
        # With the first gone the other's wish counts.
        while second.reports[-1].role != "mixed":
            await worker.subscribe(Listen(second.address, 600, "r", "decode", "mixed"))
            await asyncio.sleep(0.05)
        assert second.reports[-1].gateways == 1
    ray.kill(worker.actor)
