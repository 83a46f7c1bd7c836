"""Three nodes on one machine: workers, pools and a node die while answers are compared. Run by ``test_nodes.py``.

A process of its own: ``ray.cluster_utils.Cluster`` is another Ray than the one of the test session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from serve_app.wire.generate import Generated, Missing, Prefilled, PromptPath
from tests import tiny
from tests.deployments import workers
from tests.deployments.workers import Caller

MB = 1 << 20
LENGTH, ANSWER = 300, 24


class Answers:
    """What transformers' ``generate`` says, and how often the workers said it."""

    def __init__(self, path: Path) -> None:
        self._reference = tiny.load_reference(path)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.right = self.lost = 0
        self.tiers: dict[str, int] = {}

    def expected(self, ids: list[int]) -> list[int]:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = tiny.reference_tokens(self._reference, ids, ANSWER, eos_token_id=None)
        return self._known[key]

    def check(self, ids: list[int], tokens: list[int], result: Generated) -> None:
        assert tokens == self.expected(ids), f"a wrong token in an answer to {len(ids)} tokens"
        self.right += 1
        for tier in ("own", "node", "disk", "remote", "computed"):
            self.tiers[tier] = self.tiers.get(tier, 0) + getattr(result.path, tier)


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(LENGTH)]


async def ask(caller: Caller, answers: Answers, worker: Any, ids: list[int]) -> bool:
    """False: the worker was lost, as its caller would notice; then the caller asks another."""
    try:
        tokens, result = await asyncio.wait_for(caller.generate(worker, ids, max_tokens=ANSWER), 60)
    except RayError:
        answers.lost += 1
        return False
    answers.check(ids, tokens, result)
    return True


async def hand_over(caller: Caller, answers: Answers, decode: Any, prefill: Any, ids: list[int]) -> PromptPath:
    """As :meth:`deployments.stage.EngineStage.generate` does it."""
    call = replace(caller.call(ids, max_tokens=ANSWER), prefill_above=1)
    found = await decode.generate(call)
    assert isinstance(found, Missing), found
    running = asyncio.ensure_future(caller.follow(call, decode, arriving=True))
    told = Prefilled(call.id)
    with contextlib.suppress(RayError):
        done = await caller.prefill(prefill, ids)
        told = Prefilled(call.id, done.cached, done.node)
    await decode.prefilled(told)
    tokens, result = await running
    assert isinstance(result, Generated), result
    answers.check(ids, tokens, result)
    return result.path


async def traffic(caller: Caller, answers: Answers, live: list[Any], seeds: range, disturb: Any = None) -> None:
    """Two turns of several conversations, the second on another worker; ``disturb`` strikes in the middle."""

    async def conversation(number: int, seed: int) -> None:
        ids = prompt(seed)
        for turn in range(2):
            while not await ask(caller, answers, live[(number + turn) % len(live)], ids):
                await asyncio.sleep(0.2)
            ids = ids + answers.expected(ids) + prompt(seed + 1000)[:40]

    for seed in seeds:  # computed beforehand, so that the strike falls into the workers' time
        first = prompt(seed)
        answers.expected(first + answers.expected(first) + prompt(seed + 1000)[:40])
    running = [asyncio.ensure_future(conversation(n, seed)) for n, seed in enumerate(seeds)]
    if disturb is not None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(disturb)
    await asyncio.gather(*running)


async def main(directory: Path) -> dict[str, Any]:
    # Large enough that fetching is worth it, also between nodes.
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5}
    path = tiny.write_checkpoint(directory / "tiny", "llama", **sizes)
    answers = Answers(path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 100 * MB})
    try:
        nodes = [cluster.add_node(num_cpus=4, object_store_memory=100 * MB) for _ in range(2)]
        ray.init(address=cluster.address, namespace="serve_app", log_to_driver=False)
        first, second = (node.node_id for node in nodes)

        def start(stage: str, node_id: str) -> Any:
            return workers.start(path, stage, node_id=node_id, several_nodes=True, kv_disk_bytes=50 * MB)

        def pool(node_id: str) -> Any:
            return ray.get_actor(f"kvpool:{node_id}", "serve_app")

        here, there, prefill = start("decode", first), start("decode", second), start("prefill", second)
        for worker in (here, there, prefill):
            await worker.ready()
        async with Caller() as caller:
            seen: dict[str, Any] = {}
            await traffic(caller, answers, [here, there], range(4))
            seen["remote"] = answers.tiers["remote"]

            # A hand-over between nodes, and one whose prefill worker dies.
            path_taken = await hand_over(caller, answers, here, prefill, prompt(50))
            seen["handed_over"] = path_taken.prefilled
            dying = asyncio.ensure_future(hand_over(caller, answers, here, prefill, prompt(51) + prompt(52)))
            ray.kill(prefill.actor)
            await dying

            await traffic(caller, answers, [here, there], range(10, 16), lambda: ray.kill(pool(second)))
            directory_actor = ray.get_actor("kvdirectory", "serve_app")
            await traffic(
                caller, answers, [here, there], range(20, 24), lambda: ray.kill(directory_actor, no_restart=False)
            )

            async def lose_a_worker() -> None:
                live = [here, there]

                def strike() -> None:
                    ray.kill(there.actor)
                    live[1] = here

                await traffic(caller, answers, live, range(30, 36), strike)

            await lose_a_worker()
            again = start("decode", second)
            await again.ready()
            live = [here, again]

            def node_dies() -> None:
                live[1] = here
                cluster.remove_node(nodes[1], allow_graceful=False)

            await traffic(caller, answers, live, range(40, 46), node_dies)
            await traffic(caller, answers, [here], range(40, 46))
        return {"right": answers.right, "lost": answers.lost, "tiers": answers.tiers, **seen}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        print(json.dumps(asyncio.run(main(Path(scratch)))))
    sys.exit(0)
