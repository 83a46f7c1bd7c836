"""Bytes or a form in, bytes or parts out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.api.errors import InvalidInput
from serve_app.api.multipart import BodyPart
from serve_app.api.types import ModelLimits, TaskRequest, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.echo.declaration import DECLARATION
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import Answer, Body, BodyLimits, Task
from serve_app.tasks.work import Runtime


@dataclass(slots=True)
class EchoRequest(TaskRequest):
    sound: bytes
    times: int = 1


class Echo(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = EchoRequest
    bodies: ClassVar = frozenset({"bytes", "multipart"})

    def body_limit(self, settings: BodyLimits) -> int:
        return 4096

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        sound = {"type": "string", "contentMediaType": "audio/x-parrot"}
        return {"input": sound, "output": sound}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> EchoRequest:
        if not body.parts:
            return EchoRequest(body.data)
        parts = {part.name: part for part in body.parts}
        if "sound" not in parts:
            raise InvalidInput("sound is missing; send it as a part.", param="sound")
        return EchoRequest(parts["sound"].data, int(parts["times"].text) if "times" in parts else 1)

    async def run(self, runtime: Runtime, model: ServedModel, request: EchoRequest, caller: Caller) -> list[bytes]:
        async with runtime.work(model, caller, facts={"bytes": len(request.sound)}) as work:
            work.placed = True
            heard = [await runtime.call_retried(model, "repeat", request.sound) for _ in range(request.times)]
            work.usage = Usage(prompt_tokens=len(request.sound))
        return heard

    async def answer(self, runtime: Runtime, model: ServedModel, request: EchoRequest, result: list[bytes]) -> Answer:
        if len(result) == 1:
            return Answer(result[0], "audio/x-parrot")
        return Answer(
            [BodyPart(f"sound{i}", data, "audio/x-parrot") for i, data in enumerate(result)], "multipart/form-data"
        )


TASK = Echo()
