"""One case: a request, and what is to come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.conformance.shapes import Shape


@dataclass(slots=True, frozen=True)
class Models:
    """What to ask; "" where the server has none. ``account``: in Workers AI's paths."""

    chat: str
    embed: str = ""
    rerank: str = ""
    account: str = "local"


# What a stream's parts have to be; each part is (event name or "", data).
Parts = Callable[[list[tuple[str, Any]]], str | None]


@dataclass(slots=True, frozen=True)
class Case:
    """``needs``: which of :class:`Models` it asks. ``ours``: how this server differs on purpose, and why."""

    api: str
    name: str
    method: str
    path: str
    body: Any = None
    status: int | tuple[int, ...] = 200
    shape: Shape = None
    parts: Parts | None = None
    lines: bool = False  # a stream of one JSON object a line instead of events
    headers: dict[str, Any] = field(default_factory=dict)  # of the answer: names and what their values begin with
    needs: Literal["chat", "embed", "rerank", ""] = "chat"
    keyless: bool = False
    ours: str = ""
