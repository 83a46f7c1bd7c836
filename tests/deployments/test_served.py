"""A worker tells each gateway what tenants were served by way of the others."""

from __future__ import annotations

import asyncio

import ray

from serve_app.channel.served import gateway_name
from serve_app.kv.keys import tenant_id
from tests import tiny
from tests.deployments import workers
from tests.deployments.workers import SALT, Caller


async def test_two_gateways_hear_the_same_of_one_tenant(ray_cluster, tmp_path):
    worker = workers.start(tiny.write_checkpoint(tmp_path / "tiny", "llama"), "decode")
    async with Caller() as one, Caller() as two, asyncio.timeout(120):
        about = {"lease_s": 60, "replica": "r", "role": "decode"}
        for caller in (one, two):
            await worker.subscribe.remote({"inbox": caller.address.to_wire(), **about})
        prompt = list(range(3, 103))
        tokens, _ = await one.generate(worker, prompt, max_tokens=20)
        again, result = await one.generate(worker, prompt, max_tokens=20)
        assert tokens == again and len(tokens) == 20
        cached = result["cached"]
        assert cached >= 64
        expected = (gateway_name(one.address), tenant_id(SALT).hex(), "realtime", 200 - cached, cached, 40)
        for caller in (one, two):
            while not any(entry[1:] == expected for r in caller.reports for entry in r.served):
                await asyncio.sleep(0.05)
    ray.kill(worker)
