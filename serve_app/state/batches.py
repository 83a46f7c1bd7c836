"""Batches: many requests that are answered in time, whatever dies meanwhile. Nouns, and what is asked of a store.

A batch is cut into shards: requests of one model, in the order in which they are run. A runner claims a shard for some
seconds and renews its claim while it works. Each claim counts an epoch, and results are written only under the epoch of
the claim they were made under, together with their entries of the ledger, in one transaction. So a request may run
twice, and it has one result and is charged once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from serve_app.state.accounts import Caller

if TYPE_CHECKING:
    from serve_app.state.protocols import Row

# validating: its input is being checked and cut into shards. finalizing: every request has its result, and the files
# of results are being written. cancelling: runners end what they have begun.
Status = Literal[
    "validating", "queued", "running", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired"
]
ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled", "expired"})
# How one request ended. failed: with an error of its own, or after its last try.
Outcome = Literal["succeeded", "failed", "cancelled", "expired"]


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One request as it lies in a shard. ``number``: its place in the input, from 0. ``id``: what its sender calls it
    (`custom_id`, `external_reference`), None for nothing. ``url``: the path it is posted to, such as
    `/v1/chat/completions`. ``body``: JSON.
    """

    number: int
    id: str | None
    url: str
    body: bytes


@dataclass(slots=True, frozen=True)
class Counts:
    """Requests of a batch by how they ended; the rest of ``total`` is still to come."""

    total: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def left(self) -> int:
        return self.total - self.succeeded - self.failed - self.cancelled - self.expired


@dataclass(slots=True, frozen=True)
class Used:
    """What the requests that have results took. ``neurons``: millionths. ``money``: 1e-9 of ``currency``."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    neurons: int = 0
    money: int = 0
    currency: str = ""


@dataclass(slots=True, frozen=True)
class Batch:
    """``id``: 32 hex digits. ``door``: the dialect it came by: "workers-ai", "openai", "anthropic" or "python".
    ``caller``: who sent it. ``deadline``: when what is not done expires. ``keep_s``: for how long results are kept
    after its end. ``about``: JSON for its door alone (metadata, endpoint, ids of files). ``problems``: JSON, a list of
    what is wrong with its input; only of one that has failed. Times: unix seconds, None while there is none.

    ``input``, ``output``, ``errors``: names of blobs, "" while there is none. The input is what its sender sent; the
    two others are written at the end, one JSON object a line in the order of the input, by the door's own writer.
    """

    id: str
    door: str
    caller: Caller
    created: float
    deadline: float
    keep_s: float
    status: Status = "validating"
    about: bytes = b"{}"
    problems: bytes = b"[]"
    input: str = ""
    output: str = ""
    errors: str = ""
    counts: Counts = field(default_factory=Counts)
    used: Used = field(default_factory=Used)
    started: float | None = None
    finalizing: float | None = None
    cancelling: float | None = None
    ended: float | None = None


@dataclass(slots=True, frozen=True)
class Shard:
    """``number``: in the order in which shards are run. ``model``: what its requests ask for. ``blob``: where they lie
    (:func:`pack` and :func:`unpack`). ``requests``: how many.
    """

    number: int
    model: str
    blob: str
    requests: int


@dataclass(slots=True, frozen=True)
class Claim:
    """A shard that a runner works on, the ``epoch``-th time that somebody does. ``done``: numbers of the requests that
    have results already.
    """

    batch: Batch
    shard: Shard
    epoch: int
    done: frozenset[int]


@dataclass(slots=True, frozen=True)
class Result:
    """How one request ended. ``status``: of HTTP. ``body``: JSON of the answer, or of the error in the words of the
    request's dialect. ``request_id``: of its trace and its entry, "" where none was made.
    """

    number: int
    id: str | None
    outcome: Outcome
    status: int
    body: bytes
    request_id: str = ""
    used: Used = field(default_factory=Used)


@dataclass(slots=True, frozen=True)
class Waiting:
    """What is left to do for one model. ``deadline``: the earliest of its batches (unix seconds)."""

    requests: int
    deadline: float


class BatchStore(Protocol):
    """All calls block and raise `Away`. ``owner``: a runner's name, new at each start. ``until``: the unix time up to
    which a claim holds without being renewed.
    """

    def create(self, batch: Batch) -> None:
        """Raises `ValueError` for an id that is there already."""

    def find(self, account: str, batch_id: str) -> Batch | None:
        """One look-up by key, however many batches there are."""

    def page(
        self, account: str, doors: Collection[str] = (), *, after: str = "", before: str = "", limit: int = 20
    ) -> list[Batch]:
        """The newest first, behind the batch of id ``after`` or in front of ``before``; one more than ``limit`` tells
        that there are more.
        """

    # -- checking the input

    def claim_input(self, owner: str, now: float, until: float, batch_id: str = "") -> Batch | None:
        """A batch that is validating, and that nobody checks."""

    def planned(self, owner: str, batch_id: str, shards: Sequence[Shard], wrong: Sequence[Result], now: float) -> bool:
        """The input is cut: from now on its shards can be claimed. ``wrong``: requests that can't be run. False: it is
        no longer the owner's, or was cancelled, and nothing was written.
        """

    def refused(self, owner: str, batch_id: str, problems: bytes, now: float) -> bool:
        """The input is wrong as a whole: the batch has failed."""

    # -- running

    def claim(self, owner: str, now: float, until: float, models: Collection[str], limit: int) -> list[Claim]:
        """Shards of these models that nobody works on: first of accounts that have the fewest claims, there of batches
        with the earliest deadline, in their order. A batch is running from its first claim on.
        """

    def renew(self, owner: str, now: float, until: float) -> dict[tuple[str, int], bool]:
        """The owner's claims by batch and shard, and whether each batch is to be ended (cancelled, or past its
        deadline). What is missing here belongs to somebody else by now.
        """

    def write(self, owner: str, done: Mapping[tuple[str, int, int], Sequence[Result]], entries: Sequence[Row]) -> bool:
        """Results by batch, shard and epoch, with their entries, in one transaction. False: one of the claims is no
        longer the owner's, and nothing was written.
        """

    def finish(self, owner: str, batch_id: str, shard: int, epoch: int) -> bool:
        """Every request of the shard has its result, or is cancelled or expired: what has none is counted as such."""

    def release(self, owner: str) -> None:
        """The owner ends: others may claim what it had at once."""

    def waiting(self) -> dict[str, Waiting]:
        """By model; batches that are still to be checked are under ""."""

    # -- ending

    def claim_end(self, owner: str, now: float, until: float) -> Batch | None:
        """A batch whose shards are all finished and whose results are to be put into files; it is finalizing. Those
        past their deadline, or cancelled without a claim, get here as well.
        """

    def results(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Result]:
        """In the order of the input, behind the request ``after``; of a batch under way too. After its end they are in
        its files alone.
        """

    def end(self, owner: str, batch_id: str, output: str, errors: str, now: float) -> bool:
        """The files are written: the batch has ended (completed, cancelled or expired), its results leave the store."""

    # -- by their sender

    def cancel(self, account: str, batch_id: str, now: float) -> Batch | None: ...

    def delete(self, account: str, batch_id: str) -> Batch | None:
        """Only of one that has ended; None otherwise. Whoever calls deletes its blobs."""

    def retry(self, account: str, batch_id: str, shards: Sequence[Shard], now: float, deadline: float) -> Batch | None:
        """Has requests of an ended batch that failed, expired or were cancelled run again, which ``shards`` hold."""

    def trim(self, now: float, limit: int = 100) -> list[Batch]:
        """Forgets batches that were kept long enough; whoever calls deletes their blobs."""


def pack(requests: Sequence[Request]) -> bytes:
    """A shard's blob: msgpack, an array."""
    return msgspec.msgpack.encode(requests)


def unpack(blob: bytes) -> list[Request]:
    """Raises `msgspec.DecodeError` for a blob that is none."""
    return msgspec.msgpack.decode(blob, type=list[Request])
