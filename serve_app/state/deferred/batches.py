"""Batches: many requests that are answered in time, whatever dies meanwhile. Nouns, and what is asked of a store.

A batch is cut into shards: requests of one model, in the order in which they are run. A runner claims a shard for some
seconds and renews its claim while it works. Each claim counts an epoch, and results are written only under the epoch of
the claim they were made under, together with their entries of the ledger, in one transaction. So a request may run
twice, and it has one result and is charged once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from serve_app.state.callers.accounts import Caller

if TYPE_CHECKING:
    from serve_app.state.blobs.files import Files
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
    `/v1/chat/completions`. ``body``: JSON. ``kept``: what was looked up when the batch was taken in, and is the same
    whenever the request runs (:attr:`serve_app.api.identity.Identity.kept`).
    """

    number: int
    id: str | None
    url: str
    body: bytes
    kept: dict[str, str] = {}


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
    """``id``: 32 hex digits. ``door``: the API it came by: "workers-ai", "openai", "anthropic" or "python".
    ``caller``: who sent it. ``deadline``: when what is not done expires. ``keep_s``: for how long results are kept
    after its end. ``about``: JSON for its API alone (metadata, endpoint, ids of files). ``problems``: JSON, a list of
    what is wrong with its input; only of one that has failed. Times: unix seconds, None while there is none.

    ``input``, ``output``, ``errors``: names of blobs, "" while there is none. The input is what its sender sent; the
    two others are written at the end, one JSON object a line in the order of the input, by the API's own writer.
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
    """A shard that a runner works on, the ``epoch``-th time that somebody does. ``done``: how many of its requests have
    results already; see :meth:`BatchStore.done`.
    """

    batch: Batch
    shard: Shard
    epoch: int
    done: int


@dataclass(slots=True, frozen=True)
class Held:
    """A claim that a runner still has. ``ends``: the batch is cancelled, or past its deadline."""

    batch: str
    shard: int
    epoch: int
    ends: bool


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
class ShardResults:
    """Results of one shard, made under the claim of that ``epoch``, and what they cost."""

    batch: str
    shard: int
    epoch: int
    results: Sequence[Result]
    entries: Sequence[Row] = ()


@dataclass(slots=True, frozen=True)
class Waiting:
    """What is left to do for one model. ``deadline``: the earliest of its batches (unix seconds)."""

    requests: int
    deadline: float


class BatchStore(Protocol):
    """All calls block and raise `Away`. ``owner``: a runner's name, new at each start. ``until``: the unix time up to
    which a claim holds without being renewed. ``max_left``: unfinished requests that one account may have.
    """

    max_left: int

    def create(self, batch: Batch, owner: str = "", until: float = 0.0) -> None:
        """Writes the batch down, on disk when this returns; an ``owner`` has claimed its input. Raises `ValueError` for
        an id that is there already, and `QueueFull` where the account would have too many unfinished requests. What of
        them is known before the input is checked stands in ``batch.counts.total``.
        """

    def find(self, account: str, batch_id: str) -> Batch | None:
        """One look-up by key, however many batches there are."""

    def known(self, ids: Collection[str]) -> set[str]:
        """Those of the ids that are batches, of any account."""

    def page(
        self, account: str, doors: Collection[str] = (), *, after: str = "", before: str = "", limit: int = 20
    ) -> list[Batch]:
        """The newest first, of these APIs or of all: those behind the batch of id ``after``, or the last ones in front
        of ``before``. One more than ``limit`` tells that there are more.
        """

    def left(self, account: str) -> int:
        """Requests of the account that have no result yet."""

    def busy(self) -> bool:
        """Whether any batch has something left to do."""

    # -- checking the input

    def claim_input(self, owner: str, now: float, until: float) -> Batch | None:
        """Of the batches that are validating, and that nobody checks, the one with the earliest deadline."""

    def planned(self, owner: str, batch_id: str, shards: Sequence[Shard], wrong: Sequence[Result], now: float) -> bool:
        """The input is cut: from now on its shards can be claimed. ``wrong``: requests that can't be run. False: it is
        no longer the owner's, or was cancelled, and nothing was written.
        """

    def refused(self, owner: str, batch_id: str, problems: bytes, now: float) -> bool:
        """The input is wrong as a whole: the batch has failed."""

    # -- running

    def claim(
        self,
        owner: str,
        now: float,
        until: float,
        models: Collection[str],
        limit: int,
        *,
        requests: int = sys.maxsize,
        resting: Collection[tuple[str, str]] = (),
    ) -> list[Claim]:
        """Shards of these models that nobody works on: first of accounts that have the fewest claims, there of batches
        with the earliest deadline, in their order. At most ``limit``, and no more once they have so many ``requests``;
        none of accounts and models that are ``resting``. A batch is running from its first claim on.
        """

    def done(self, batch_id: str, numbers: Collection[int]) -> frozenset[int]:
        """Which of these requests have results."""

    def renew(self, owner: str, now: float, until: float) -> list[Held]:
        """The owner's claims of shards. What is missing here belongs to somebody else by now. Claims of inputs and ends
        are renewed as well.
        """

    def write(self, owner: str, parts: Sequence[ShardResults]) -> set[tuple[str, int]]:
        """Results with what they cost, in one transaction; writing one twice is writing it once. Answers with batch and
        number of shards that are no longer the owner's, of which nothing was written.
        """

    def finish(self, owner: str, batch_id: str, shard: int, epoch: int, now: float) -> bool:
        """Every request of the shard has its result, or its batch is to be ended: then what has none is counted as
        cancelled or expired. False: neither is so, or the shard is no longer the owner's.
        """

    def give_back(self, owner: str, batch_id: str, shard: int, epoch: int) -> None:
        """Others may claim the shard at once."""

    def release(self, owner: str) -> None:
        """The owner ends: others may claim what it had at once."""

    def waiting(self) -> dict[str, Waiting]:
        """By model; batches that are still to be checked are under ""."""

    # -- ending

    def claim_end(self, owner: str, now: float, until: float) -> Batch | None:
        """A batch whose shards are all finished and whose results are to be put into files; it is finalizing. Those
        past their deadline, or cancelled, get here once nobody works on them.
        """

    def results(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Result]:
        """In the order of the input, behind the request ``after``; of a batch under way too. After its end they are in
        its files alone.
        """

    def fill(self, owner: str, batch_id: str, rest: Sequence[Result]) -> bool:
        """Results of requests that have none and are counted already, of a batch that is finalizing; those that have
        one keep it. False: it is no longer the owner's, and nothing was written.
        """

    def end(self, owner: str, batch_id: str, output: str, errors: str, now: float) -> Batch | None:
        """The files are written: the batch has ended (completed, cancelled or expired), on disk when this returns. What
        it took to get there is :meth:`clear`'s. None: it is no longer the owner's, and nothing was written.
        """

    def uncleared(self, limit: int = 100) -> list[str]:
        """Ids of batches that have ended and still have shards or results in the store."""

    def shards(self, batch_id: str) -> list[Shard]:
        """In their order, finished or not."""

    def clear(self, batch_id: str) -> None:
        """Drops shards and results of a batch that has ended. The blobs of its shards go before."""

    # -- by their sender

    def cancel(self, account: str, batch_id: str, now: float) -> Batch | None:
        """Asks for its end; the batch as it is then. One that is finalizing or has ended stays as it is."""

    def old(self, now: float, limit: int = 100) -> list[Batch]:
        """Batches that were kept long enough."""

    def delete(self, account: str, batch_id: str) -> Batch | None:
        """Forgets a batch that has ended; None: there is none. Its blobs go before."""


def pack(requests: Sequence[Request]) -> bytes:
    """A shard's blob: msgpack, an array."""
    return msgspec.msgpack.encode(requests)


def unpack(blob: bytes) -> list[Request]:
    """Raises `msgspec.DecodeError` for a blob that is none."""
    return msgspec.msgpack.decode(blob, type=list[Request])


def forget(store: BatchStore, files: Files, batch: Batch) -> bool:
    """Deletes a batch that has ended, with its blobs; whether it was there. The input of a batch may be a file of its
    sender's own, which stays. Blocks.
    """
    files.delete_below(f"batches/{batch.id}")
    return store.delete(batch.caller.account, batch.id) is not None
