"""Ranks of one worker on two machines, which are network namespaces of this one. Run by ``test_machines.py`` inside the
first; stages of the model after the first are in the second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from serve_app.models.load import load_causal_lm
from serve_app.parallel.link import LinkAddress
from serve_app.worker.loading import load_model
from serve_app.worker.ranks import begin_ranks, load_together, run_rank
from serve_app.worker.spec import WorkerSpec
from tests import tiny
from tests.parallel.groups import spec_of, until
from tests.parallel.test_divided import generate, prompts


def start(spec: WorkerSpec, rank: int, address: LinkAddress, second: str) -> subprocess.Popen[bytes]:
    """A rank's process; ``second`` names the other machine."""
    told = json.dumps([dataclasses.asdict(spec), rank, dataclasses.asdict(address)])
    away = ["ip", "netns", "exec", second] if rank >= spec.tensor_parallel else []
    return subprocess.Popen([*away, sys.executable, "-m", "tests.parallel.machines", "rank", told])


def rank_main(told: str) -> None:
    spec, rank, address = json.loads(told)
    torch.set_num_threads(1)
    run_rank(WorkerSpec(**spec), rank, LinkAddress(**address), lambda step: None)


def main(path: Path, host: str, second: str, tensor: int, pipeline: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spec, lost = spec_of(path, tensor, pipeline, dtype="float32", several_nodes=True), []
    ranks = begin_ranks(
        spec, lambda *told: start(spec, *told, second), host, lambda step: None, end=lost.append
    )  # fmt: skip
    try:
        model = load_together(ranks, lambda: load_model(spec, path, lambda step: None, ranks.group))
        found = [generate(tiny.make_engine(model, num_blocks=100), prompts(8))]
        engine = tiny.make_engine(model, num_blocks=100, max_batch_tokens=23)
        found += [generate(engine, prompts(8)), generate(engine, prompts(8))]
        assert engine.stats.cached_tokens > 0
        whole = load_causal_lm(path, dtype="float32", optimise=False)
        assert model.kv_shape.layout == whole.kv_shape.layout
        addresses = sorted({peer.line.getpeername()[0] for peer in ranks.leader._peers.values()})
        # One of the other machine dies, which rank 0 hears of by its line alone.
        assert lost == []
        os.kill(ranks.handles[-1].pid, signal.SIGKILL)
        until(lambda: lost)
        return {"answers": found, "lost": lost[0], "peers": addresses}
    finally:
        ranks.close()
        for process in ranks.handles:
            process.wait(30)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(sys.argv[2])
    else:
        folder, where, other, parts, stages = sys.argv[1:]
        print(json.dumps(main(Path(folder), where, other, int(parts), int(stages))), flush=True)
        os._exit(0)
