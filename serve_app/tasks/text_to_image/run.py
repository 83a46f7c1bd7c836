"""Pictures drawn by a worker, in one call; their progress is asked for while it runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

from serve_app.api.drawing import SIDE, Drawn, DrawRequest, Progress, tiles
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.work import Runtime
from serve_app.wire.methods import PROGRESS
from serve_app.wire.predict import ProgressCall

# Seconds between two questions about the progress, and for an answer.
LOOK_S = 0.5
ANSWER_S = 5.0
# So long a refusal of the worker is waited for before an answer that streams begins.
REFUSED_S = 1.0


def units_of(request: DrawRequest, width: int, height: int) -> dict[str, int]:
    """What pictures of that size take."""
    count = tiles(width, height) * request.copies
    found = {
        "image_tiles": count,
        "image_steps": request.steps * request.copies,
        "image_tile_steps": count * request.steps,
    }
    if request.image:
        found |= {"input_tiles": count, "input_tile_steps": count * request.steps}
    return found


def most(request: DrawRequest) -> dict[str, int]:
    """The most units that the request can take: how large a picture is that a client has sent is not known yet."""
    side = int(SIDE.high)
    return units_of(request, request.width or side, request.height or side)


async def draw(
    runtime: Runtime, model: ServedModel, request: DrawRequest, caller: Caller
) -> AsyncIterator[Progress | Drawn]:
    """The progress, where the request is to stream, and the pictures. Closing it ends the work within a step."""
    facts = {"copies": request.copies, "steps": request.steps}
    watch = secrets.token_hex(8) if request.stream else ""
    async with runtime.work(
        model, caller, reject_if_busy=request.reject_if_busy, facts=facts, worst=most(request)
    ) as work:
        drawing = asyncio.ensure_future(predict(runtime, work, [request.parcel(watch)], {}))
        try:
            if watch:
                # What is refused is refused with an HTTP status; then the answer begins, whatever it waits for.
                if (await asyncio.wait({drawing}, timeout=REFUSED_S))[0]:
                    drawing.result()
                told = Progress(0, request.steps)
                yield told
            while watch and not (await asyncio.wait({drawing}, timeout=LOOK_S))[0]:
                now = await _progress(runtime, model, watch)
                if now is not None and now.done > told.done:
                    told = now
                    yield told
            [found] = await drawing
        finally:
            if not drawing.done():
                drawing.cancel()
                await asyncio.wait({drawing})
    yield Drawn(tuple(found["images"]), tuple(found["seeds"]), work.units, work.usage)


async def _progress(runtime: Runtime, model: ServedModel, watch: str) -> Progress | None:
    """As the worker tells it that draws; None where none does, or does not answer."""
    if runtime.ask_all is None:
        return None
    try:
        asked = runtime.ask_all(model, PROGRESS, ProgressCall(watch))
        told = [one for one in await asyncio.wait_for(asked, ANSWER_S) if one.steps]
    except Exception:  # a replica that ends or starts: the picture itself is waited for anyway
        return None
    return Progress(told[0].done, told[0].steps) if told else None
