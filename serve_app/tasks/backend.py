"""What answers a model's generation requests: engine workers here, or a provider, or a container."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from serve_app.api.types import Event, GenerateRequest, ModelLimits

if TYPE_CHECKING:
    from serve_app.api.decisions import DecideRequest, Decisions
    from serve_app.state.callers.accounts import Caller
    from serve_app.tasks.estimate import Foreseen
    from serve_app.tasks.model import ServedModel
    from serve_app.tasks.work import Work


@dataclass(slots=True, frozen=True)
class Prepared:
    """A request that its backend can run as it is; ``prompt`` is the backend's own form of it."""

    request: GenerateRequest
    prompt_tokens: int
    prompt: Any = None


@dataclass(slots=True, frozen=True)
class PreparedQuestions:
    """Questions that their backend can answer as they are: ``prompts`` is its own form of them, ``tokens`` in all."""

    request: DecideRequest
    tokens: int
    prompts: Any = None


class Backend(Protocol):
    """Yields a request's events. Needs no tokenizer, weights or stages: what has them is one implementation."""

    def limits(self, model: ServedModel) -> ModelLimits:
        """Bounds and defaults that bodies are read with."""

    async def prepare(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> Prepared:
        """Checks all that can be checked before the request waits. ``salt``: that of its account's caches. Raises
        `ApiError`.
        """

    def events(self, prepared: Prepared, work: Work) -> AsyncIterator[Event]:
        """The request's events but the last, its usage: that is in ``work.usage`` once the iterator ends or is closed.

        Closing it ends the request wherever it is. ``work.placed`` is set once a worker has been chosen.
        """

    async def prepare_questions(self, model: ServedModel, request: DecideRequest) -> PreparedQuestions:
        """Checks all that can be checked before the questions wait. Raises `ApiError`."""

    async def decide(self, prepared: PreparedQuestions, work: Work) -> Decisions:
        """The answers; what they took is in ``work.usage``."""

    async def foresee(self, model: ServedModel, prepared: Prepared, caller: Caller, salt: bytes) -> Foreseen:
        """What would become of the request if it came now; ``salt`` is that of its account's caches."""

    async def count_tokens(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> int:
        """How many tokens the prompt has, whether or not the context window would take it."""

    def waiting(self, model: ServedModel) -> str:
        """What a request would wait for while the model starts, in words; "" for nothing."""
