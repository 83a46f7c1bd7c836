"""Queues: messages that one pushes and another pulls, each under a lease. Nouns, and what is asked of a store.

A message is there once. Whoever pulls it has it for some time, its lease; what is acknowledged under the lease is gone,
what is not comes again, up to so many attempts, and then goes to a dead letter queue or away.

A queue may be bound to a model: then its messages are requests, which the runners of batches take, and each answer is a
message of another queue. The answer is written, the request removed and its entry added to the ledger in one
transaction under the lease. So a request may run twice, and it has one answer and is charged once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Waiting
from serve_app.state.errors import StateError

if TYPE_CHECKING:
    from serve_app.state.protocols import Row

ContentType = Literal["text", "json", "bytes", "v8"]
# Pulled over HTTP, or run by a model.
Kind = Literal["http_pull", "workers_ai"]
KEEP_S = 4 * 86400.0
# The most queues of an account.
MAX_QUEUES = 1000
# Bytes of a queue from which on no more is pushed, as many as Cloudflare's, and what each message counts for at least.
MAX_BACKLOG, LEAST_MESSAGE = 25_000_000_000, 1024


class QueueError(StateError):
    """A queue cannot be made, changed or removed; the text says what to do."""


@dataclass(slots=True, frozen=True)
class Consumer:
    """What takes a queue's messages. ``batch``: messages of one pull, and ``lease_s`` how long it has them, unless a
    pull says otherwise. ``retries``: attempts after the first; ``delay_s`` is before each of them. ``dead``: the name
    of the queue to which a message goes after the last, "" for none. ``model`` and ``results`` (a queue's name): of a
    queue that is bound to a model.
    """

    id: str
    kind: Kind
    created: float
    batch: int = 5
    lease_s: float = 30.0
    retries: int = 3
    delay_s: float = 0.0
    dead: str = ""
    model: str = ""
    results: str = ""


@dataclass(slots=True, frozen=True)
class Queue:
    """``id``: 32 hex digits. ``delay_s``: before a message can be pulled, unless it says otherwise. ``keep_s``: for how
    long one waits at most. ``paused``: nothing is pulled or run. ``purged``: when it was emptied last. Times: unix
    seconds.
    """

    id: str
    account: str
    name: str
    created: float
    modified: float
    delay_s: float = 0.0
    keep_s: float = KEEP_S
    paused: bool = False
    purged: float | None = None
    consumer: Consumer | None = None


@dataclass(slots=True, frozen=True)
class New:
    """A message to push. ``id``: 32 hex digits; one that is there already is not pushed again. ``delay_s`` None: the
    queue's.
    """

    id: str
    body: bytes
    kind: ContentType = "json"
    delay_s: float | None = None


@dataclass(slots=True, frozen=True)
class Message:
    """``sent``: when it was pushed, in unix seconds. ``attempts``: how often it was pulled, this time included.
    ``lease``: by which it is acknowledged, "" for none.
    """

    id: str
    queue: str
    body: bytes
    kind: ContentType
    sent: float
    attempts: int
    lease: str = ""


@dataclass(slots=True, frozen=True)
class Task:
    """A message that a runner has, and what is to be done with it."""

    message: Message
    caller: Caller
    consumer: Consumer


@dataclass(slots=True, frozen=True)
class Answered:
    """What came of a task. ``body``: JSON, for the queue of results. ``dead``: the request is kept in the dead letter
    queue, if there is one.
    """

    task: Task
    body: bytes
    entries: Sequence[Row] = ()
    dead: bool = False


@dataclass(slots=True, frozen=True)
class Backlog:
    """Messages that are not acknowledged. ``oldest``: when the first of them was pushed, None where there is none."""

    count: int = 0
    bytes: int = 0
    oldest: float | None = None

    @property
    def full(self) -> bool:
        """Whether there is no room for another message."""
        return max(self.bytes, self.count * LEAST_MESSAGE) >= MAX_BACKLOG


@dataclass(slots=True)
class Acknowledged:
    """``unknown``: leases that have ended, or were none."""

    acked: int = 0
    retried: int = 0
    unknown: list[str] = field(default_factory=list)


class QueueStore(Protocol):
    """All calls block and raise `Away`. Times: unix seconds."""

    def create(self, account: str, name: str, now: float) -> Queue:
        """Raises :class:`QueueError` where there is one of this name, or too many."""

    def find(self, account: str, queue_id: str) -> Queue | None: ...

    def all(self, account: str) -> list[Queue]: ...

    def change(self, account: str, queue_id: str, now: float, **fields: object) -> Queue | None:
        """``fields``: of :class:`Queue`; ``consumer`` None takes its consumer away. Raises :class:`QueueError` for a
        name that is taken, and for a consumer whose queue of results is not there.
        """

    def remove(self, account: str, queue_id: str) -> bool:
        """With all its messages. Raises :class:`QueueError` while another queue's answers go there."""

    def push(self, queue: Queue, messages: Sequence[New], caller: Caller, now: float) -> None:
        """On disk when this returns."""

    def pull(self, queue: Queue, limit: int, lease_s: float, now: float) -> list[Message]: ...

    def peek(self, queue: Queue, limit: int, now: float) -> list[Message]:
        """The next messages, without a lease and without an attempt."""

    def settle(
        self, queue: Queue, acks: Collection[str], retries: Collection[tuple[str, float | None]], now: float
    ) -> Acknowledged:
        """``retries``: leases, and after how many seconds each message can be pulled again (None: as its consumer
        says).
        """

    def purge(self, queue: Queue, now: float, message_ids: Collection[str] | None = None) -> int:
        """Drops messages, None: all of them; how many."""

    def backlog(self, queue_id: str) -> Backlog: ...

    # -- of queues that are bound to a model

    def waiting(self, now: float) -> dict[str, Waiting]:
        """By model."""

    def take(self, models: Collection[str], limit: int, now: float, until: float) -> list[Task]:
        """Messages under leases that end at ``until`` unless they are renewed."""

    def renew(self, leases: Collection[str], until: float) -> set[str]:
        """Those of the leases that still hold."""

    def again(self, task: Task, at: float, *, counts: bool) -> None:
        """It is tried again then. ``counts``: as one of its attempts."""

    def answer(self, answered: Sequence[Answered], now: float) -> set[str]:
        """Writes answers and entries, and removes the requests, of those whose lease still holds: their ids."""

    def trim(self, now: float) -> None:
        """Drops what has waited too long; what a model was to run is answered with an error."""
