"""The nouns that dispatch, router, admission, fairness and planner share.

Times are seconds on one clock of the caller's choice (the gateway's monotonic clock, or the simulator's); token counts
are whole tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from serve_app.costs.steps import StepSample
from serve_app.costs.transfers import FetchSample, TierCost

Role = Literal["prefill", "decode", "mixed"]  # a preference: every text worker can do both
Priority = Literal["realtime", "batch"]


@dataclass(slots=True, frozen=True)
class BatchLoad:
    """What batch requests have of a worker: prefill queued, sequences, blocks."""

    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0


@dataclass(slots=True, frozen=True)
class Standing:
    """A tenant's streams of one priority that run on a worker or wait there."""

    tenant: str
    priority: str
    streams: int
    weight: float = 1.0


@dataclass(slots=True)
class WorkerLoad:
    """What one worker reports of itself, a few times per second and with every change that matters.

    ``batch`` is on top of the other numbers: real-time requests get it at once where they need it.
    ``reported_at`` is on the reader's clock: the reader sets it to the time of receipt. ``steps`` and ``fetches`` are
    samples since the last report, for the cost model. ``standing``: who has places or waits for one, while none is
    free. Keys of K/V that are gone are given by their first eight bytes, one behind the other.
    """

    worker: str
    node: str
    role: Role = "mixed"
    stage: str = ""  # the deployment that the worker belongs to
    queued_prefill_tokens: int = 0  # prompt tokens not computed yet and not cached, of waiting and running requests
    running: int = 0  # sequences that generate
    waiting: int = 0  # requests that will generate here and have no place in the batch yet
    max_seqs: int = 32
    kv_blocks_used: int = 0  # held by requests; blocks that are only cached count as free
    kv_blocks_total: int = 1
    block_tokens: int = 32
    max_batch_tokens: int = 2048  # token budget of one step
    step_seconds: float = 0.0  # smoothed time of a step at the present batch; 0: not known yet
    steps: tuple[StepSample, ...] = ()
    fetches: tuple[FetchSample, ...] = ()
    reported_at: float = 0.0
    batch: BatchLoad = BatchLoad()
    adapters: frozenset[bytes] = frozenset()  # in its memory, by name
    incoming_tokens: int = 0  # whose K/V are on their way here from pools or other workers, or ready to go
    standing: tuple[Standing, ...] = ()
    weights: bytes = b""  # what its keys start from: others' are of no use to it
    evicted: bytes = b""  # keys that its own cache has let go
    pool: str = ""  # the incarnation of its node's pool; "": not known
    pool_tokens: int = 0  # that the pool may hold
    pool_evicted: bytes = b""  # keys that the pool has let go
    leaving: bool = False  # it ends what it has, and gets nothing new
    zone: str = ""  # of its node; "": not known
    tiers: tuple[TierCost, ...] = ()  # what it takes fetches to cost

    @property
    def whole(self) -> WorkerLoad:
        """As batch requests find it: what others of them have is taken."""
        batch = self.batch
        return replace(
            self,
            queued_prefill_tokens=self.queued_prefill_tokens + batch.queued_prefill_tokens,
            running=self.running + batch.running,
            waiting=self.waiting + batch.waiting,
            kv_blocks_used=self.kv_blocks_used + batch.kv_blocks_used,
        )

    @property
    def kv_tokens_used(self) -> int:
        """What requests hold."""
        return self.kv_blocks_used * self.block_tokens

    @property
    def kv_tokens_total(self) -> int:
        return self.kv_blocks_total * self.block_tokens


@dataclass(slots=True)
class RouteRequest:
    """A request as the router sees it.

    ``keys`` name the prompt's leading chunks, ``chunk_tokens`` of the router's locality index each, salted by tenant
    (the last block key of each chunk from :mod:`serve_app.kv.keys` will do). ``tenant`` and ``priority`` come from
    the caller's key, never from a header; a tenant's part of tokens and places grows with its ``weight``. One prompt
    may have several answers: ``streams`` of them run at once, each of up to ``max_tokens``.
    """

    id: str
    prompt_tokens: int
    keys: Sequence[bytes] = ()
    expected_output_tokens: int = 256  # of each stream
    max_tokens: int = 256  # of each stream
    stay_tokens: int = 256  # of each stream, by which its place is expected to be free again
    streams: int = 1
    session: str | None = None  # from x-session-affinity or prompt_cache_key, made unique per tenant
    tenant: str = ""
    weight: float = 1.0
    priority: Priority = "realtime"
    arrived_at: float = 0.0
    deadline: float | None = None  # latest time of the first token; None: the model's target, if it has one
    reject_if_busy: bool = False
    adapter: bytes = b""  # its name; empty: none
    adapter_bytes: int = 0
    zone: str = ""  # of the gateway that it came by
    long: bool = False  # by itself it takes so long that others would miss their targets behind it
    # Prompt tokens that a cache was expected to hold when the request arrived; None where no worker was up.
    expected_cached_tokens: int | None = None


@dataclass(slots=True)
class Decision:
    """Where a request goes. ``prefill`` None: the decode worker computes the prompt itself, in chunks.

    ``decode`` may name a worker that prefers prefill: the request then stays where it is prefilled. ``ttft`` is
    counted from now.
    """

    decode: str
    prefill: str | None
    ttft: float  # predicted seconds to the first token
    itl: float  # predicted seconds between tokens on the decode worker
    uncached: int  # prompt tokens that a worker has to compute
    wait: float = 0.0  # of ``ttft``, seconds before anything is computed for this request
    place: float = 0.0  # of ``wait``, for a place among the streams
    behind: float = 0.0  # of ``wait``, for transfers that go before
    compute: float = 0.0  # seconds of prefill on the worker that computes the prompt
    fetch: float = 0.0  # seconds of that worker's link, for what pools hold
    crossing: float = 0.0  # of ``fetch``, from other nodes
    moved: float = 0.0  # seconds of the decode worker's link, for the hand-over
    ready: float = 0.0  # seconds until the prompt is computed
    batch: int = 0  # streams on the decode worker before this request
    why: str = ""  # "least ttft", "session", "prefill behind", ...


@dataclass(slots=True, frozen=True)
class Prediction:
    """What would become of a request that arrived now. ``wait``: seconds before anything is computed for it; ``ttft``:
    seconds to its first token, ``wait`` included.
    """

    cached_tokens: int
    wait: float
    ttft: float


@dataclass(slots=True)
class Refusal:
    """Not now: HTTP 429 with code 3040 and this ``Retry-After``, the predicted wait in seconds."""

    retry_after: float
    reason: str
    start_worker: bool = False  # no worker is up: one should be started, so that the client finds it
