"""How a gateway reaches models' replicas: given to it from outside, so that it knows nothing of Ray."""

from __future__ import annotations

from typing import Protocol

from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import C, Method, R


class Call(Protocol):
    """Calls one replica of a model's stage ("": the one that requests are sent to), as a wish ``replica``. Raises
    :class:`~serve_app.tasks.work.WorkerGone` where another may do better, also for one that runs another version.
    """

    async def __call__(
        self, model: ServedModel, method: Method[C, R], call: C, stage: str = "", replica: str = ""
    ) -> R: ...


class AskAll(Protocol):
    """Calls every replica of a stage."""

    async def __call__(self, model: ServedModel, method: Method[C, R], call: C, stage: str = "") -> list[R]: ...
