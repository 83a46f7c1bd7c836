"""Another rank of a worker than its engine: loads its part of the model, and computes it in each of rank 0's steps."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from serve_app.parallel.link import Follower, LinkAddress
from serve_app.parallel.shelf import Shelf
from serve_app.wire.ranks import RankFailed, RankLoaded, RankMeeting
from serve_app.worker.ranks import Progress, place_of

if TYPE_CHECKING:
    from serve_app.worker.spec import WorkerSpec

log = logging.getLogger(__name__)


def run_rank(
    spec: WorkerSpec, rank: int, address: LinkAddress, progress: Progress, shelf: Shelf | None = None, node: str = ""
) -> None:
    """What another rank does until rank 0 goes: loads its part, and computes it in each step. ``shelf``: what it has
    for pools and from them; ``node``: where it is.
    """
    link = Follower.connect(rank, address, end=lambda: os._exit(0))
    try:
        _follow(spec, rank, link, address.token, progress, shelf or Shelf(spec.export_bytes), node)
    except BaseException as error:
        log.exception("rank %d ends", rank)
        with contextlib.suppress(OSError):
            link.say(RankFailed(rank, f"{type(error).__name__}: {error}"))
        raise


def _follow(
    spec: WorkerSpec, rank: int, link: Follower, token: str, progress: Progress, shelf: Shelf, node: str
) -> None:
    import torch

    from serve_app.parallel.cache import CacheShard, told_states
    from serve_app.parallel.meeting import Meeting, join
    from serve_app.parallel.steps import SharedForward, follow
    from serve_app.worker.loading import load_model, prepare_torch, resolve_weights

    prepare_torch(spec)
    meeting = link.next()
    if not isinstance(meeting, RankMeeting):
        return
    place, device = place_of(spec, rank), torch.device(spec.device)
    where = Meeting(meeting.host, meeting.port, meeting.file)
    group = join(place, device, where, token, waiting=link.together, agree=link.agree)
    began = time.perf_counter()
    model = load_model(spec, resolve_weights(spec, progress), progress, group)
    shared = model.forward
    assert isinstance(shared, SharedForward)
    seconds = time.perf_counter() - began
    read, held = model.report["read_bytes"], model.report["held_bytes"]
    log.info("%s has read %d bytes of files in %.1f s and holds weights of %d bytes", place, read, seconds, held)
    linears = model.adapters.whole_linears if model.adapters is not None else ()  # type: ignore[attr-defined]
    states = model.kv_shape.states
    link.moved = shelf.look
    link.say(RankLoaded(rank, model.part, read, held, seconds, linears, told_states(states), states.single, node))
    progress("ready")
    own = CacheShard.of(model.part, model.kv_shape.dtype, states)
    follow(link, shared, own, model.dtype, shelf, model.adapters)
