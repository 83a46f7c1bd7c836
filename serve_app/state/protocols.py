"""What gateways ask of a store. All calls block, and raise :class:`serve_app.state.errors.Away` while it cannot
be reached: they belong on threads of their own, never on an event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.state.accounts import Account, Priority
from serve_app.state.streams import Known, Part, Running, Shown, Taken


@dataclass(slots=True, frozen=True)
class Row:
    """Something to write down. ``kind`` names the room; a later row of the same kind and ``key`` replaces an earlier
    one that still waits. ``columns``: text, numbers, bytes and None. ``size``: bytes, about.
    """

    kind: str
    key: tuple[str, ...]
    columns: dict[str, Any]
    size: int


class RowRoom(Protocol):
    """A room whose rows are written in groups."""

    KIND: str

    def write(self, connection: Any, rows: Sequence[dict[str, Any]]) -> None:
        """Within a transaction. Writing a row twice is writing it once."""


class AccountStore(Protocol):
    NAME: str

    def all(self) -> dict[str, Account]: ...

    def add(self, name: str, *, weight: float | None = None, priority: Priority = "realtime") -> str: ...

    def remove(self, name: str, key_id: str | None = None) -> None: ...


class RateStore(Protocol):
    def add(self, minute: int, counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], tuple[int, int]]: ...


class ResponseStore(Protocol):
    def body(self, account: str, response_id: str) -> bytes | None: ...

    def delete(self, account: str, response_id: str) -> bool: ...

    def chain(self, account: str, response_id: str, turns: int) -> list[tuple[str | None, bytes]]: ...


class TraceStore(Protocol):
    def body(self, account: str, request_id: str) -> bytes | None: ...


class StreamStore(Protocol):
    max_bytes: int

    def write(self, owner: str, parts: Sequence[Part], now: float, until: float) -> set[str]: ...

    def beat(self, owner: str, until: float, watched: Collection[str], now: float) -> list[Running]: ...

    def orphans(self, now: float, limit: int) -> list[str]: ...

    def take(self, owner: str, stream_id: str, now: float) -> Taken | None: ...

    def release(self, owner: str) -> None: ...

    def shown(self, account: str, stream_id: str, after: int) -> Shown | None: ...

    def cancel(self, account: str, stream_id: str) -> str | None: ...

    def trim(self, now: float) -> None: ...


class AnswerStore(Protocol):
    def claim(self, owner: str, until: float, account: str, key: str, print: str, now: float) -> Known | None: ...

    def keep(self, owner: str, account: str, key: str, answer: bytes) -> None: ...

    def free(self, owner: str, account: str, key: str) -> None: ...


class Store(Protocol):
    """``away``: why it cannot be reached, and for how many seconds."""

    @property
    def accounts(self) -> AccountStore: ...

    @property
    def rates(self) -> RateStore: ...

    @property
    def responses(self) -> ResponseStore: ...

    @property
    def traces(self) -> TraceStore: ...

    @property
    def answers(self) -> AnswerStore: ...

    @property
    def streams(self) -> StreamStore: ...

    @property
    def name(self) -> str: ...

    @property
    def away(self) -> str | None: ...

    @property
    def away_s(self) -> float: ...

    def open(self) -> None: ...

    def write(self, rows: Sequence[Row]) -> None:
        """All of them or none."""

    def revisions(self) -> dict[str, int]:
        """By room; a number that differs from the one before says that the room has changed."""

    def close(self) -> None: ...
