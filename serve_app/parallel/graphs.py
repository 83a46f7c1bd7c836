"""Steps of answers as CUDA graphs on every rank of a stage, collectives among what they hold.

A graph waits in its collectives for the others', as a pass does. So all ranks record the same graphs at the same time
and replay the same one for a step: rank 0 says which. Where one of them can't record, none has any.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from serve_app.engine.gpu.graphs import CudaCapture, DecodeGraphs
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.runner import Forward
from serve_app.engine.step import Batch
from serve_app.parallel.link import Follower, Leader
from serve_app.parallel.place import Place
from serve_app.wire.ranks import RankGraphs, RankRecord


def can_record(place: Place) -> bool:
    """Stages hand steps on while others are under way, and rows that travel are counted by the host in each step."""
    return place.pipeline == 1 and (not place.whole_experts or place.dispatch == "never")


def graphs_of(local: Forward, kv: KVCache, said: RankGraphs) -> DecodeGraphs:
    """A rank's. On a CPU nothing is recorded: a graph is the pass itself, padded to its size."""
    capture = CudaCapture() if kv.device.type == "cuda" else lambda run: run
    return DecodeGraphs(local, kv, max_num_seqs=said.max_num_seqs, max_model_len=said.max_model_len, capture=capture)


class LedGraphs:
    """Rank 0's: computes batches by ``led`` (:class:`~serve_app.parallel.steps.LedForward`), which asks it for a graph
    for each. Plugged in where an engine has :class:`DecodeGraphs`.
    """

    def __init__(self, led: Any, local: Forward, kv: KVCache, leader: Leader, said: RankGraphs) -> None:
        self.own = graphs_of(local, kv, said)
        self._led, self._leader = led, leader
        leader.tell(said)

    def __call__(self, batch: Batch) -> Tensor:
        return self._led(batch)

    def prepare_when_due(self) -> None:
        if self.own.due:
            self.prepare()

    def prepare(self) -> bool:
        """As :meth:`DecodeGraphs.prepare`, on every rank."""
        found = self.own.missing()
        if found is None:
            return False
        size, adapted = found
        started = time.monotonic()
        with self._led.counted():
            self._leader.tell(RankRecord(size, adapted))
            worked = self._leader.agree(self.own.record(size, adapted=adapted))
        if worked:
            self.own.recorded(started)
        else:
            self.own.refuse(adapted=adapted)
        return worked


def record(graphs: DecodeGraphs, said: RankRecord, link: Follower) -> None:
    """Another rank's part in :meth:`LedGraphs.prepare`."""
    if not link.agree(graphs.record(said.size, adapted=said.adapted)):
        graphs.refuse(adapted=said.adapted)
