"""What a task is: how its native body is read, run, answered and streamed. A folder's `task.py` has one, ``TASK``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from serve_app.api.errors import InvalidInput
from serve_app.api.multipart import BodyPart
from serve_app.api.types import ModelLimits, TaskRequest
from serve_app.catalog.tasks import TaskDeclaration
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.estimate import Estimate
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime

BodyKind = Literal["json", "bytes", "multipart"]


@dataclass(slots=True)
class Body:
    """A request's body, as one of the kinds its task takes: a JSON object, bytes with the client's label, or parts."""

    json: dict[str, Any] = field(default_factory=dict)
    data: bytes = b""
    media_type: str = ""
    parts: list[BodyPart] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Answer:
    """A whole answer: a JSON value, bytes of ``media_type``, or a list of parts that are sent as multipart."""

    body: Any
    media_type: str = "application/json"


@dataclass(slots=True, frozen=True)
class Streamed:
    """An answer of events: ``frames`` writes them as server-sent events, ``values`` as one dict each.

    ``waiting()`` says what the first event waits for if that takes long, "" for nothing. ``resumable_s``: see
    :class:`~serve_app.api.types.TaskRequest`.
    """

    events: AsyncIterator[Any]
    frames: Callable[[AsyncIterator[Any]], AsyncIterator[bytes]]
    values: Callable[[AsyncIterator[Any]], AsyncIterator[dict[str, Any]]]
    waiting: Callable[[], str] = lambda: ""
    resumable_s: float | None = None


class BodyLimits(Protocol):
    """An operator's bounds of bodies, in bytes."""

    max_body_bytes: int
    max_embedding_body_bytes: int
    max_media_body_bytes: int


class Task(ABC):
    """``read`` a native body, ``run`` what it asks for, ``answer`` with what came of it.

    Other dialects bring requests of the type ``takes`` and go on with :meth:`run`.
    """

    declaration: ClassVar[TaskDeclaration]
    takes: ClassVar[type[TaskRequest]]
    bodies: ClassVar[frozenset[BodyKind]] = frozenset({"json"})

    def body_limit(self, settings: BodyLimits) -> int:
        """Bytes of a body. Thousands of texts are an ordinary request."""
        return settings.max_embedding_body_bytes

    @abstractmethod
    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        """JSON Schemas of a model's ``input`` and ``output``."""

    @abstractmethod
    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> TaskRequest:
        """The request in a native body. Raises `ApiError`."""

    @abstractmethod
    async def run(self, runtime: Runtime, model: ServedModel, request: Any, caller: Caller) -> Any:
        """What came of the request; each piece of work is settled by ``runtime.work``."""

    async def estimate(self, runtime: Runtime, model: ServedModel, request: Any, caller: Caller) -> Estimate:
        """What :meth:`run` would use and cost. Raises `ApiError` for what it would refuse as wrong."""
        raise InvalidInput(f"What {self.declaration.name} costs can't be told before it runs.", param="estimate")

    @abstractmethod
    async def answer(self, runtime: Runtime, model: ServedModel, request: Any, result: Any) -> Answer | Streamed:
        """What :meth:`run` gave, in the native dialect."""
