"""What runners ask of the store and of files: off their event loop, and again while either is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from serve_app.state.errors import Away

log = logging.getLogger("ray.serve")

AGAIN_S = 0.5
_P = ParamSpec("_P")
_T = TypeVar("_T")


async def ask(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What ``call``, which blocks, gives; raises neither `Away` nor `OSError`."""
    told = False
    while True:
        try:
            return await asyncio.to_thread(call, *args, **kwargs)
        except (Away, OSError) as error:
            if not told:
                log.warning("batches wait: %s", error)
                told = True
        await asyncio.sleep(AGAIN_S)
