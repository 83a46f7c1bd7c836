"""What gateways ask of a store. All calls block, and raise :class:`serve_app.state.errors.Away` while it cannot
be reached: they belong on threads of their own, never on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from serve_app.state.callers.accounts import Account, Key, Member, Scope
from serve_app.state.callers.audit import Actor, Change
from serve_app.state.deferred.events import Delivery, Subscription
from serve_app.state.kept.streams import Head, KeyClaim, Known, Running, Shown, StreamPart, Taken
from serve_app.state.spending.quotas import Granted, Quota, Want

if TYPE_CHECKING:
    from serve_app.state.blobs.adapters import AdapterStore
    from serve_app.state.blobs.uploads import UploadStore
    from serve_app.state.callers.attempts import AttemptStore
    from serve_app.state.callers.sessions import SessionStore
    from serve_app.state.deferred.batches import BatchStore
    from serve_app.state.deferred.queues import QueueStore
    from serve_app.state.deferred.reports import ReportStore
    from serve_app.state.kept.history import HistoryStore
    from serve_app.state.kept.prompt_log import PromptStore
    from serve_app.state.kept.traces import ListedTrace, TraceQuery
    from serve_app.state.operated import OperatedStore
    from serve_app.state.spending.ledger import Entry
    from serve_app.state.spending.usage import UsagePage, UsageQuery


@dataclass(slots=True, frozen=True)
class Row:
    """Something to write down. ``kind`` names the room; a later row of the same kind and ``key`` replaces an earlier
    one that still waits. ``columns``: text, numbers, bytes, None and lists. ``size``: bytes, about.
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


class KeyStore(Protocol):
    def create(self, account: str, *, by: Actor | None = None, **fields: Any) -> tuple[Key, str]: ...

    def change(self, account: str, key_id: str, *, by: Actor | None = None, **fields: Any) -> Key: ...

    def roll(self, account: str, key_id: str, *, by: Actor | None = None) -> str: ...

    def remove(self, account: str, key_id: str, *, by: Actor | None = None) -> None: ...

    def used(self, when: Mapping[str, float]) -> None: ...


class MemberStore(Protocol):
    def create(self, account: str, email: str, scopes: Iterable[Scope], *, by: Actor | None = None) -> Member: ...

    def change(self, account: str, member_id: str, scopes: Iterable[Scope], *, by: Actor | None = None) -> Member: ...

    def remove(self, account: str, member_id: str, *, by: Actor | None = None) -> None: ...


class AuditStore(Protocol):
    def read(
        self,
        account: str | None = None,
        *,
        since: float | None = None,
        before: float | None = None,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
    ) -> list[Change]: ...


class AccountStore(Protocol):
    NAME: str

    @property
    def keys(self) -> KeyStore: ...

    @property
    def members(self) -> MemberStore: ...

    @property
    def audit(self) -> AuditStore: ...

    def all(self, name: str | None = None) -> dict[str, Account]: ...

    def get(self, name: str) -> Account: ...

    def create(
        self,
        name: str,
        *,
        label: str = "",
        weight: float = 1.0,
        limits: Mapping[str, Any] | None = None,
        by: Actor | None = None,
    ) -> Account: ...

    def ensure(self, name: str, *, by: Actor | None = None) -> None: ...

    def change(
        self,
        name: str,
        *,
        label: str | None = None,
        weight: float | None = None,
        limits: Mapping[str, Any] | None = None,
        by: Actor | None = None,
    ) -> Account: ...

    def remove(self, name: str, key_id: str | None = None, *, by: Actor | None = None) -> None: ...


class LeaseStore(Protocol):
    away_s: float

    def lease(self, owner: str, now: float, wants: Sequence[Want]) -> dict[Quota, Granted]: ...

    def forget(self, owner: str) -> None: ...

    def trim(self, now: float) -> None: ...


class AlertStore(Protocol):
    shares: tuple[int, ...]

    def trim(self, now: float) -> None: ...


class EventStore(Protocol):
    def subscribe(
        self,
        account: str,
        now: float,
        *,
        kinds: Iterable[str],
        url: str = "",
        queue: str = "",
        name: str = "",
        model: str = "",
        enabled: bool = True,
        by: Actor | None = None,
    ) -> Subscription: ...

    def subscriptions(self, account: str | None) -> list[Subscription]: ...

    def change(
        self, account: str, subscription_id: str, now: float, *, by: Actor | None = None, **fields: Any
    ) -> Subscription | None: ...

    def unsubscribe(self, account: str, subscription_id: str, *, by: Actor | None = None) -> Subscription | None: ...

    def take(
        self, now: float, limit: int, without: Collection[str] = (), but_of: Collection[str] = ()
    ) -> list[Delivery]: ...

    def delivered(self, delivery_id: str, now: float) -> None: ...

    def later(self, delivery: Delivery, now: float, trouble: str) -> bool: ...

    def gone(self, delivery: Delivery, now: float) -> None: ...

    def deliveries(self, subscription_id: str, *, limit: int = 100) -> list[Delivery]: ...

    def replay(
        self, subscription_id: str, now: float, *, since: float = 0.0, delivery_id: str = "", everything: bool = False
    ) -> int: ...

    def trim(self, now: float) -> None: ...


class ResponseStore(Protocol):
    def body(self, account: str, response_id: str) -> bytes | None: ...

    def delete(self, account: str, response_id: str) -> bool: ...

    def chain(self, account: str, response_id: str, turns: int) -> list[tuple[str | None, bytes]]: ...


@dataclass(slots=True, frozen=True)
class Conversation:
    """``created``: unix seconds. ``next``: the position of the next item. ``size``: bytes. ``metadata``: JSON."""

    id: str
    created: float
    next: int
    size: int
    metadata: bytes


class ConversationStore(Protocol):
    KIND: str

    def create(self, account: str, conversation_id: str, metadata: bytes) -> None: ...

    def find(self, account: str, conversation_id: str) -> Conversation | None: ...

    def update(self, account: str, conversation_id: str, metadata: bytes) -> bool: ...

    def delete(self, account: str, conversation_id: str) -> bool: ...

    def add(self, account: str, conversation_id: str, items: Sequence[tuple[str, bytes]]) -> bool: ...

    def items(
        self,
        conversation_id: str,
        *,
        after: str | None = None,
        before: int | None = None,
        limit: int,
        descending: bool = False,
    ) -> list[bytes]: ...

    def item(self, conversation_id: str, item_id: str) -> bytes | None: ...

    def remove(self, account: str, conversation_id: str, item_id: str) -> bool: ...


class TraceStore(Protocol):
    def body(self, account: str, request_id: str) -> bytes | None: ...

    def list(self, query: TraceQuery) -> list[ListedTrace]: ...


class StreamStore(Protocol):
    max_bytes: int

    def write(
        self,
        owner: str,
        parts: Sequence[StreamPart],
        now: float,
        until: float,
        last: Callable[[], tuple[float, Sequence[Head]]] | None = None,
    ) -> set[str]: ...

    def beat(self, owner: str, until: float, watched: Collection[str], now: float) -> list[Running]: ...

    def orphans(self, now: float, limit: int) -> list[str]: ...

    def take(self, owner: str, stream_id: str, now: float) -> Taken | None: ...

    def release(self, owner: str) -> None: ...

    def refuse(self, owner: str, heads: Sequence[Head], now: float) -> set[str]: ...

    def shown(self, account: str, stream_id: str, after: int) -> Shown | None: ...

    def cancel(self, account: str, stream_id: str) -> str | None: ...

    def trim(self, now: float) -> None: ...


class AnswerStore(Protocol):
    def claim(self, claim: KeyClaim, until: float, print: str) -> Known | None: ...

    def keep(self, claim: KeyClaim, answer: bytes, entries: Sequence[Row] = ()) -> bool: ...

    def free(self, claim: KeyClaim) -> None: ...


class LedgerStore(Protocol):
    def trim(self, before: float) -> int: ...

    def close_days(self, now: float) -> bool: ...


class UsageStore(Protocol):
    entries_kept_s: float

    def sums(self, query: UsageQuery) -> UsagePage: ...

    def entries(self, query: UsageQuery) -> list[Entry]: ...

    def receipt(self, account: str | None, request_id: str) -> list[Entry]: ...


class Store(Protocol):
    """``away``: why it cannot be reached, and for how many seconds."""

    @property
    def accounts(self) -> AccountStore: ...

    @property
    def leases(self) -> LeaseStore: ...

    @property
    def alerts(self) -> AlertStore: ...

    @property
    def events(self) -> EventStore: ...

    @property
    def queues(self) -> QueueStore: ...

    @property
    def responses(self) -> ResponseStore: ...

    @property
    def conversations(self) -> ConversationStore: ...

    @property
    def traces(self) -> TraceStore: ...

    @property
    def answers(self) -> AnswerStore: ...

    @property
    def streams(self) -> StreamStore: ...

    @property
    def batches(self) -> BatchStore: ...

    @property
    def adapters(self) -> AdapterStore: ...

    @property
    def history(self) -> HistoryStore: ...

    @property
    def sessions(self) -> SessionStore: ...

    @property
    def prompts(self) -> PromptStore: ...

    @property
    def attempts(self) -> AttemptStore: ...

    @property
    def reports(self) -> ReportStore: ...

    @property
    def operated(self) -> OperatedStore: ...

    @property
    def uploads(self) -> UploadStore: ...

    @property
    def ledger(self) -> LedgerStore: ...

    @property
    def usage(self) -> UsageStore: ...

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
