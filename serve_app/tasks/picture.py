"""Requests that ask something about one picture: how they are read, run and told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.api.fields.files import read_file
from serve_app.api.types import TaskRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate, Foreseen, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.task import Body
from serve_app.tasks.work import Runtime

# Every such request has one.
UNITS = {"images": 1}


@dataclass(slots=True)
class PictureRequest(TaskRequest):
    """``image``: the file as it came. ``options``: for the task's worker."""

    image: bytes
    options: Mapping[str, Any] = field(default_factory=dict)


def open_picture(body: Body) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """The file, the fields beside it, and how the request asks to be treated."""
    if body.data:
        return body.data, {}, {}
    fields, asked = open_native(body.json)
    return read_file(b"", fields, "image"), fields, asked


async def look(runtime: Runtime, model: ServedModel, request: PictureRequest, caller: Caller) -> Any:
    """The worker's result for the picture."""
    facts = {"bytes": len(request.image)}
    async with runtime.work(model, caller, reject_if_busy=request.reject_if_busy, facts=facts, worst=UNITS) as work:
        [found] = await predict(runtime, work, [request.image], request.options)
    return found


def estimate_picture(runtime: Runtime, model: ServedModel) -> Estimate:
    """What one picture costs, whatever is on it."""
    return estimate_of(runtime.quote(model), model, UNITS, UNITS, UNITS, Foreseen())
