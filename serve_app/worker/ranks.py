"""A worker of several ranks: rank 0 starts the others, meets them, and they load and compute one model together.

``start(rank, address)`` starts a process that calls :func:`serve_app.worker.follower.run_rank`; how, and where, is its
caller's affair.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve_app.parallel.link import Leader, LinkAddress, RankLost
from serve_app.parallel.place import Place
from serve_app.wire.ranks import RankMeeting

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel
    from serve_app.parallel.group import Group
    from serve_app.parallel.steps import LedForward
    from serve_app.worker.spec import WorkerSpec

log = logging.getLogger(__name__)

StartRank = Callable[[int, LinkAddress], Any]
Progress = Callable[[str], None]
# A rank that is lost while the model loads: others notice in their collectives, and the first reason is the one to
# tell. So long until this process ends whatever it waits for.
LOADING_GRACE_S = 10.0


@dataclass(slots=True)
class Ranks:
    """Rank 0's side of its group. ``handles`` are what ``start`` gave, in order: they keep the others alive, and give
    and read chunks (:mod:`serve_app.worker.rank_store`). ``node``: where this is.
    """

    leader: Leader
    group: Group
    handles: list[Any]
    end: Callable[[str], None]
    node: str = ""
    forward: LedForward | None = None
    # How rows go to experts, and how evenly these are placed, if the record asks for either.
    experts: dict[str, str] = field(default_factory=dict)

    def take(self, model: CausalModel) -> None:
        """Makes of rank 0's part of a model the whole one. Raises :class:`RankLost`."""
        from serve_app.parallel.adapters import GroupBank
        from serve_app.parallel.cache import CacheShard, GroupShape, numbered, states_told
        from serve_app.parallel.steps import LedForward, SharedForward

        loaded = self.leader.await_loaded()
        dtype = model.kv_shape.dtype
        layers = numbered([model.part, *(each.layers for each in loaded)])
        states = [model.kv_shape.states, *(states_told(each.states, single=each.single) for each in loaded)]
        parts = [CacheShard.of(own, dtype, kept) for own, kept in zip(layers, states, strict=True)]
        shared = model.forward
        assert isinstance(shared, SharedForward)
        self.forward = LedForward(shared, self.leader, self._failed)
        model.forward = self.forward
        if model.adapters is not None:
            model.adapters.learn(linear for each in loaded for linear in each.linears)  # type: ignore[attr-defined]
            model.adapters = GroupBank(model.adapters, self.leader)  # type: ignore[assignment]
        away = frozenset(each.rank for each in loaded if each.node != self.node)
        model.kv_shape = GroupShape.of(
            parts, dtype, self.group, self.leader, self._failed, away=away, handles=self.handles
        )
        self.experts = {key: found for key in ("expert_dispatch", "expert_copies") if (found := model.report.get(key))}
        model.report["ranks"] = [
            f"rank {each.rank}: {each.read_bytes} bytes read in {each.seconds:.1f} s, {each.held_bytes} held"
            for each in loaded
        ]

    def states(self) -> list[dict[str, Any]]:
        """What each rank holds and does, rank 0 first."""
        from serve_app.parallel.life import memory_bytes

        own: dict[str, Any] = {"rank": 0, "pid": os.getpid(), "memory_bytes": memory_bytes(os.getpid())}
        if self.forward is not None:
            own |= {"together_s": round(self.group.waiting.total_s, 3), "forward_s": round(self.forward.seconds, 3)}
            own |= {"steps": self.forward.work.steps, "busy_s": round(self.forward.work.busy_s, 3)}
        return [own | self.experts, *self.leader.states()]

    def close(self) -> None:
        self.leader.close()

    def _failed(self, error: BaseException) -> None:
        """A pass that has failed on one rank has left the others in the middle of theirs."""
        self.end(self.leader.reason() or f"a step failed ({type(error).__name__}: {error})")


def place_of(spec: WorkerSpec, rank: int = 0) -> Place:
    """Where a rank of the worker stands."""
    whole = spec.expert_parallel > 1
    dispatch = spec.expert_dispatch if whole else "never"
    return Place(
        spec.tensor_parallel, spec.pipeline_parallel, rank, whole_experts=whole, dispatch=dispatch,
        copies=spec.expert_copies if whole else 0,
    )  # fmt: skip


def refuse_features(spec: WorkerSpec) -> None:
    """Raises ValueError for what a worker of several ranks can't do yet. Records are refused alike when they are read
    (:func:`serve_app.catalog.ranks.check_ranks`); this is for workers that no record describes.
    """
    if spec.quantization == "fp8" and spec.pipeline_parallel > 1:
        # Stages run on transformers' forward, whose linears do not compute in float8.
        raise ValueError(
            f"quantization: fp8 does not go together with {spec.pipeline_parallel} stages yet; remove it, or "
            "pipeline_parallel"
        )


def end_worker(reason: str) -> None:
    """Ends this process, and by that the other ranks: the worker is lost, and its replica starts another."""
    log.error("the worker ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def begin_ranks(
    spec: WorkerSpec,
    start: StartRank,
    host: str,
    progress: Progress,
    end: Callable[[str], None] = end_worker,
    node: str = "",
) -> Ranks:
    """Starts the other ranks and returns once all have come. ``end`` is called when one of them is lost, or a pass
    fails; ``node``: this one's. Raises :class:`RankLost`.
    """
    import torch

    from serve_app.parallel.life import Waiting
    from serve_app.parallel.meeting import host_meeting, join

    def end_all(reason: str) -> None:
        leader.kill()
        end(reason)

    def lost(reason: str) -> None:
        if ranks is None or ranks.forward is None:
            time.sleep(LOADING_GRACE_S)
        end_all(reason)

    ranks: Ranks | None = None
    place, waiting = place_of(spec), Waiting()
    leader = Leader(place.ranks, host=host, on_lost=lost)
    leader.waits_s = lambda: max(leader.waiting.seconds, waiting.seconds)
    try:
        handles = [start(rank, leader.address) for rank in range(1, place.ranks)]
        progress(f"awaiting {place.ranks - 1} other ranks")
        meeting = host_meeting(host, place.ranks)
        leader.await_all(RankMeeting(host, meeting.port, meeting.file))
        device, token = torch.device(spec.device), leader.address.token
        group = join(place, device, meeting, token, waiting=waiting, agree=leader.agree)
    except BaseException:
        leader.close()  # which ends those that have come
        raise
    ranks = Ranks(leader, group, handles, end_all, node)
    return ranks


def load_together(ranks: Ranks, load: Callable[[], CausalModel]) -> CausalModel:
    """Rank 0's part of the model, made the whole one. What another rank says of its failure comes before what follows
    from it here.
    """
    try:
        model = load()
        ranks.take(model)
        return model
    except RankLost:
        raise
    except Exception as error:
        if reason := ranks.leader.reason():
            raise RankLost(reason) from error
        raise
