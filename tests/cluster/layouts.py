"""Workers of several ranks on two nodes of one machine: what one division has computed another takes over from its
node's pool and from files, and from the other node while it is computed. Run by ``test_layouts.py``.

A process of its own: ``ray.cluster_utils.Cluster`` is another Ray than the one of the test session.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from serve_app.kv.pool import PoolOptions, get_or_create_pool
from serve_app.wire.generate import PromptPath
from tests import tiny
from tests.cluster.nodes import ANSWER, LENGTH, MB, Answers, hand_over, prompt
from tests.deployments import workers
from tests.deployments.workers import Caller

# Of what a prompt's K/V take, which are 5 layers, K and V, 2 heads of 64 and float32.
CHUNKS_BYTES = LENGTH * 5 * 2 * 128 * 4
# Prompts that a node's pool holds beside its files.
IN_POOL = 4
# Ranks that divide layers, stages, and the node.
DIVISIONS = {"four": (4, 1, 0), "two": (2, 1, 1), "stages": (1, 2, 0), "one": (1, 1, 1)}


async def main(directory: Path) -> dict[str, Any]:
    # Large enough that fetching is worth it.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "head_dim": 64}
    path = tiny.write_checkpoint(directory / "tiny", "llama", **sizes)
    answers = Answers(path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 100 * MB})
    try:
        nodes = [cluster.head_node, cluster.add_node(num_cpus=4, object_store_memory=100 * MB)]
        ray.init(address=cluster.address, namespace="serve_app", log_to_driver=False)
        files = {"disk_directory": str(directory / "kv"), "disk_bytes": 64 * MB}
        options = PoolOptions(limit_bytes=IN_POOL * CHUNKS_BYTES, **files)
        for node in nodes:
            get_or_create_pool(node.node_id, options)
        live: dict[str, Any] = {}
        for name, (tensor, pipeline, node) in DIVISIONS.items():
            live[name] = workers.start(
                path, "decode", node_id=nodes[node].node_id, several_nodes=True, kv_disk_dir=files["disk_directory"],
                kv_disk_bytes=files["disk_bytes"], tensor_parallel=tensor, pipeline_parallel=pipeline,
                kv_cache_bytes=1 << 22,
            )  # fmt: skip
        for worker in live.values():
            await worker.ready()
        async with Caller() as caller:
            seeds = iter(range(1000))

            async def taken(giving: str, taking: str, *, waits: bool = False) -> PromptPath:
                """``waits``: until the prompt lies in files alone."""
                ids = prompt(next(seeds))
                assert (await caller.prefill(live[giving], ids)).cached == 0
                for _ in range(3 * IN_POOL if waits else 0):
                    await caller.prefill(live[giving], prompt(next(seeds)))
                tokens, result = await caller.generate(live[taking], ids, max_tokens=ANSWER)
                answers.check(ids, tokens, result)
                assert result.cached == LENGTH - 1, (giving, taking, result.path)
                return result.path

            found: dict[str, dict[str, dict[str, int]]] = {"pools": {}, "files": {}, "handed over": {}}
            for giving in live:
                for taking in live:
                    if giving == taking:
                        continue
                    way = f"{giving} to {taking}"
                    if DIVISIONS[giving][2] == DIVISIONS[taking][2]:
                        found["pools"][way] = {"node": (await taken(giving, taking)).node}
                    handed = await hand_over(caller, answers, live[taking], live[giving], prompt(next(seeds)))
                    found["handed over"][way] = {"prefilled": handed.prefilled}
            for giving, taking in (("four", "stages"), ("stages", "four"), ("two", "one"), ("one", "two")):
                took = await taken(giving, taking, waits=True)
                found["files"][f"{giving} to {taking}"] = {"disk": took.disk}
            moved = {}
            for name in live:
                ranks = (await live[name].stats()).numbers["ranks"] or []
                moved[name] = [(each["kv_given_bytes"], each["kv_taken_bytes"]) for each in ranks[1:]]
        return {"right": answers.right, "moved": moved, **found}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="layouts-") as scratch:
        print(json.dumps(asyncio.run(main(Path(scratch)))))
    sys.exit(0)
