"""Workers of several ranks, started as a deployment starts them: rank 0 in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from serve_app.channel.inbox import TokenInbox
from serve_app.parallel.meeting import leave
from serve_app.worker.engine_work import EngineWork
from serve_app.worker.ranks import Ranks, begin_ranks
from serve_app.worker.spec import WorkerSpec
from tests.parallel import groups
from tests.worker.world import MemoryPool, start


@contextlib.asynccontextmanager
async def working(
    folder: Path, pool: MemoryPool, tensor: int = 1, pipeline: int = 1, **options: Any
) -> AsyncIterator[EngineWork]:
    """A worker of the model in ``folder``, of one process if that is all it is asked for. No rank may be lost."""
    lost: list[str] = []

    def begin(spec: WorkerSpec) -> Ranks:
        return begin_ranks(
            spec, lambda *told: groups.start(spec, *told), "127.0.0.1", lambda step: None, end=lost.append
        )

    several: dict[str, Any] = {"begin": begin} if tensor * pipeline > 1 else {}
    work = start(folder, "decode", pool, tensor_parallel=tensor, pipeline_parallel=pipeline, **several, **options)
    try:
        yield work
    finally:
        await work.aclose()
        if several:
            work._ranks.close()
            leave()
    assert lost == []


async def visit(
    divisions: Sequence[Any],
    started: Callable[[Any], AbstractAsyncContextManager[EngineWork]],
    takes: Callable[[EngineWork, TokenInbox, Any, Any], Awaitable[None]],
    gives: Callable[[EngineWork, TokenInbox, Any], Awaitable[None]],
) -> None:
    """Each division in turn takes what those before it gave and gives its own, and on the way back what those behind
    it gave: one at a time, since rank 0 of each is this process.
    """
    inbox = TokenInbox()
    await inbox.start()
    try:
        for index, division in enumerate(divisions):
            async with started(division) as work:
                for giving in divisions[:index]:
                    await takes(work, inbox, division, giving)
                await gives(work, inbox, division)
        for index, division in reversed(list(enumerate(divisions[:-1]))):
            async with started(division) as work:
                for giving in divisions[index + 1 :]:
                    await takes(work, inbox, division, giving)
    finally:
        await inbox.aclose()
