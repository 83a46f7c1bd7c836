"""What goes over the cables between two nodes, by the counters of their network interfaces. Run on the head of a
cluster of machines by ``test_machines.py``, as a process of its own; prints what it found as JSON.

The shipped model: its K/V are 6,144 bytes a token in float32.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.wire.generate import Generated
from tests.cluster.machines.ray_nodes import ROOT
from tests.cluster.nodes import ANSWER, Answers, hand_over
from tests.deployments import workers
from tests.deployments.workers import Caller
from tests.waiting import until

MODEL = ROOT / "checkpoints" / "pico-instruct"
TOKEN_BYTES = 6 * 2 * 2 * 64 * 4
LENGTH = 1200
# Three seconds for a chunk, of which a fetch waits for two: nothing ever comes in time.
SLOW = "4mbit"
CHEAPER = "remote: computing is cheaper"


@ray.remote(num_cpus=0)
class Cable:
    """The end of a cable in its machine."""

    def sent(self) -> int:
        [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
        return int(line.split(":")[1].split()[8])

    def limit(self, rate: str | None) -> None:
        if rate is None:
            subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)
            return
        shaping = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", *shaping], check=True)


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 6000) for _ in range(LENGTH)]


async def main() -> dict[str, Any]:
    ray.init(address="auto", namespace="serve_app", log_to_driver=False)
    nodes = sorted((n for n in ray.nodes() if n["Resources"].get("CPU")), key=lambda n: n["NodeManagerAddress"])
    first, second = (node["NodeID"] for node in nodes)
    assert get_node_ip_address() != "127.0.0.1"
    seen: dict[str, Any] = {"addresses": [node["NodeManagerAddress"] for node in nodes]}
    answers = Answers(MODEL)

    def start(stage: str, node_id: str) -> Any:
        return workers.start(
            MODEL, stage, node_id=node_id, several_nodes=True, home="/run/home", kv_cache_bytes=64 << 20,
            max_model_len=4096, max_batch_tokens=512,
        )  # fmt: skip

    def pool(node_id: str) -> Any:
        return ray.get_actor(f"kvpool:{node_id}", "serve_app")

    def on(node_id: str) -> Any:
        return Cable.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()  # type: ignore[attr-defined]

    prefill, decode = start("prefill", first), start("decode", second)
    for worker in (prefill, decode):
        await worker.ready()
    cable = on(first)

    async def counted(work: Any) -> tuple[Any, int]:
        """What it says, and the bytes that the first node has sent meanwhile."""
        before = await cable.sent.remote()
        said = await work
        return said, await cable.sent.remote() - before

    async def published(worker: Any, node_id: str, tokens: int) -> None:
        """Until the node's pool has pulled so much."""

        async def there() -> bool:
            return int((await pool(node_id).stats.remote())["pulled_bytes"]) >= tokens * TOKEN_BYTES

        await until(there, 60)

    async with Caller(get_node_ip_address()) as caller:

        async def quiet() -> None:
            """Until what was asked for and given up does not come any more."""

            async def nothing() -> bool:
                _, sent = await counted(asyncio.sleep(1))
                return sent < 50_000

            await until(nothing, 120)

        # Idle, to know what two nodes say to each other anyway.
        _, idle = await counted(asyncio.sleep(3))
        seen["idle_bytes_per_s"] = idle / 3
        # Computed on the one, decoded on the other.
        seen["handed_over"] = []
        for seed in range(4):
            ids = prompt(seed)
            answers.expected(ids)
            path, sent = await counted(hand_over(caller, answers, decode, prefill, ids))
            seen["handed_over"].append({"path": path.shown(), "sent": sent})

        # Computed on the one before, and asked of the other, which finds it in the other node's pool by the directory.
        async def ask(seed: int) -> dict[str, Any]:
            """Of the second node, what the first has computed."""
            ids = prompt(seed)
            answers.expected(ids)
            before = (await pool(first).stats.remote())["pulled_bytes"]
            await caller.prefill(prefill, ids)
            await published(prefill, first, before // TOKEN_BYTES + LENGTH - 1)
            await asyncio.sleep(0.5)  # the directory hears ten times a second
            (tokens, result), sent = await counted(caller.generate(decode, ids, max_tokens=ANSWER))
            assert isinstance(result, Generated)
            answers.check(ids, tokens, result)
            costs = (await decode.stats()).numbers["pool"]["costs"]
            return {"path": result.path.shown(), "sent": sent, "costs": costs}

        # Who knows what computing takes chooses between that and fetching.
        ids = prompt(9)
        answers.expected(ids)
        answers.check(ids, *await caller.generate(decode, ids, max_tokens=ANSWER))
        seen["fetched"] = [await ask(seed) for seed in range(10, 14)]
        # That fetches are not worth their while is learnt from those that are given up.
        await cable.limit.remote(SLOW)
        seen["slow"] = []
        for seed in range(20, 60):
            seen["slow"].append(await ask(seed))
            await quiet()
            if seen["slow"][-1]["costs"]["decisions"].get(CHEAPER, 0) == 3:
                break
        # That it has become fast is found out by trying.
        await cable.limit.remote(None)
        seen["fast_again"] = []
        for seed in range(60, 100):
            seen["fast_again"].append(await ask(seed))
            if seen["fast_again"][-1]["path"]["remote"]:
                break
    return {**seen, "right": answers.right}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
