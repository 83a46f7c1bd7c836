"""The nouns that routing, admission, fairness and the planner share.

Times are seconds on one clock of the caller's choice (the gateway's monotonic clock, or the simulator's), token
counts are whole tokens. Nothing here reads a clock, so simulator and gateway run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["prefill", "decode", "mixed"]  # a preference: every text worker can do both
Priority = Literal["realtime", "batch"]
Tier = Literal["worker", "node", "remote", "disk"]  # engine's own blocks, this node's pool, another's, pool's files


@dataclass(slots=True, frozen=True)
class StepSample:
    """One engine step as measured: what it computed and how long it took."""

    prefill_tokens: int  # prompt tokens computed in this step
    context_tokens: int  # tokens already computed before them, summed over the step's prefilling requests
    decode_seqs: int  # sequences that generated
    kv_tokens: int  # tokens of context that the generating sequences attended to
    seconds: float


@dataclass(slots=True, frozen=True)
class FetchSample:
    """One fetch from a tier of the pool as measured: tokens copied into engine blocks, and seconds."""

    tier: Tier
    tokens: int
    seconds: float


@dataclass(slots=True)
class WorkerLoad:
    """What one worker reports of itself, a few times per second and with every change that matters.

    ``reported_at`` is on the reader's clock: whoever receives a report sets it to the time of receipt, less the
    report's age if that is known. ``steps`` and ``fetches`` are samples since the last report, for the cost model.
    """

    worker: str
    node: str
    role: Role = "mixed"
    queued_prefill_tokens: int = 0  # prompt tokens not computed yet and not cached, of waiting and running requests
    running: int = 0  # sequences that generate
    waiting: int = 0  # requests the worker knows and does not generate for yet, prefilled here or elsewhere
    max_seqs: int = 32
    kv_blocks_used: int = 0  # held by requests; blocks that are only cached count as free
    kv_blocks_promised: int = 0  # what waiting requests will need beyond ``kv_blocks_used`` for their prompts
    kv_blocks_total: int = 1
    block_tokens: int = 32
    max_batch_tokens: int = 2048  # token budget of one step
    step_seconds: float = 0.0  # smoothed time of a step at the present batch; 0: not known yet
    draining: bool = False  # finishes what it has, takes nothing new
    adapters: frozenset[str] = frozenset()  # resident LoRA adapters
    steps: tuple[StepSample, ...] = ()
    fetches: tuple[FetchSample, ...] = ()
    reported_at: float = 0.0

    @property
    def kv_tokens_used(self) -> int:
        """What requests hold or have been promised."""
        return (self.kv_blocks_used + self.kv_blocks_promised) * self.block_tokens

    @property
    def kv_tokens_total(self) -> int:
        return self.kv_blocks_total * self.block_tokens


@dataclass(slots=True)
class RouteRequest:
    """A request as the router sees it.

    ``keys`` name the prompt's leading chunks, ``chunk_tokens`` of the router's locality index each, salted by tenant
    (the last block key of each chunk from :mod:`serve_app.kv.keys` will do). ``tenant`` and ``priority`` come from
    the caller's key, never from a header.
    """

    id: str
    prompt_tokens: int
    keys: Sequence[bytes] = ()
    expected_output_tokens: int = 256
    max_tokens: int = 256
    session: str | None = None  # from x-session-affinity or prompt_cache_key, made unique per tenant
    tenant: str = ""
    priority: Priority = "realtime"
    adapter: str = ""
    arrived_at: float = 0.0
    deadline: float | None = None  # latest time of the first token; None: the model's target, if it has one
    reject_if_busy: bool = False


@dataclass(slots=True)
class CachedTokens:
    """Prompt tokens that are expected not to be computed, by the tier they come from."""

    worker: int = 0
    node: int = 0
    remote: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.worker + self.node + self.remote + self.disk


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
    uncached: int  # prompt tokens that somebody has to compute
    wait: float = 0.0  # of ``ttft``, seconds before anything is computed for this request
    compute: float = 0.0  # seconds of prefill on the worker that computes the prompt
    cached: CachedTokens = field(default_factory=CachedTokens)
    why: str = ""  # "least ttft", "session", "prefill behind", ...


@dataclass(slots=True)
class Refusal:
    """Not now: HTTP 429 with code 3040 and this ``Retry-After``, the predicted wait in seconds."""

    retry_after: float
    reason: str
