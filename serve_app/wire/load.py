"""What a worker says of its own load, a few dozen bytes, and measured steps for whoever predicts from them.

Numbers that travel through Serve's controller are seconds old; these are as old as one engine step.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from serve_app.wire.address import InboxAddress
from serve_app.wire.message import Message

# Samples per report; what does not fit is not missed.
MAX_SAMPLES = 16
# Accounts per report that have or want places; those with the fewest are left out.
MAX_STANDING = 128
# Counts of what was served per report, those that changed last; what does not fit goes along with a later one.
MAX_SERVED = 64
# Adapters per report, and bytes of each one's digest; one that is not told is taken to be loaded anew.
MAX_ADAPTERS = 128
ADAPTER_BYTES = 8
# Keys per report of K/V that are gone, and bytes of each; what does not fit goes along with a later one.
MAX_EVICTED = 256
KEY_BYTES = 8

Name = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]  # finite


class Step(NamedTuple):
    """One engine step as measured: prompt tokens computed, tokens before them, sequences that generated, tokens of
    context that these attended to, seconds.
    """

    prefill_tokens: Count
    context_tokens: Count
    decode_seqs: Count
    kv_tokens: Count
    seconds: Seconds


class Fetch(NamedTuple):
    """One fetch from a tier of the pool as measured, or the loading of an adapter: then ``tokens`` are bytes."""

    tier: Name
    tokens: Count
    seconds: Seconds


class TierCost(NamedTuple):
    """What a worker takes a fetch from a tier of the pool to cost: seconds before the first token, and of each."""

    tier: Name
    latency: Seconds
    token: Seconds


class ServedBy(NamedTuple):
    """Tokens served to one tenant in one class by way of one gateway; ``number`` is never used again by a worker."""

    number: Count
    gateway: Name
    tenant: Name
    priority: Name
    uncached: Count
    cached: Count
    output: Count


class Standing(NamedTuple):
    """One tenant's requests of one class that generate here or will, and its weight."""

    tenant: Name
    priority: Name
    streams: Count
    weight: Annotated[float, Meta(gt=0, le=1e15)]


Keys = Annotated[bytes, Meta(max_length=MAX_EVICTED * KEY_BYTES)]


class Pool(NamedTuple):
    """The pool of a worker's node: which incarnation ("": not known), tokens of this model that it may hold, and the
    first :data:`KEY_BYTES` bytes of the keys that it has let go, one behind the other.
    """

    incarnation: Name = ""
    tokens: Count = 0
    evicted: Keys = b""


class Batch(NamedTuple):
    """What batch requests have of a worker's load: it is theirs as long as no other wants it."""

    queued_tokens: Count = 0
    running: Count = 0
    waiting: Count = 0
    used_blocks: Count = 0


class LoadReport(Message, tag="load:8", frozen=True):
    """One worker's load. ``replica`` is Serve's id of the replica it belongs to, ``role`` what it prefers to do, as
    gateway ``planner`` wishes, one of ``gateways`` that it reports to ("": nobody has a wish).

    ``queued_tokens``: prompt tokens accepted, not computed yet and not stored anywhere. ``running`` requests are in the
    batch, ``waiting`` ones are not yet. ``step_seconds``: recent mean time of a step. ``steps``, ``fetches``: samples
    since the last report. ``served``: what tenants have lately got by way of each gateway. ``batch``: how much of the
    queued tokens, requests and blocks belongs to batch requests. ``adapters``: the first :data:`ADAPTER_BYTES` bytes of
    the digests of those in its memory, one behind the other, the most recently used first. ``standing``: whose requests
    they are, while no place is free. ``incoming_tokens``: of K/V that come over the link of this worker, or will.
    ``owner``: where ``planner`` listens, which owns the model's dispatch. ``weights``: what the keys of its K/V start
    from (:func:`serve_app.kv.keys.weights_key`). ``evicted``: of keys that its own cache has let go, as in
    :class:`Pool`. ``leaving``: it ends what it has, and gets nothing new. ``zone``: of its node
    (:mod:`serve_app.costs.zones`). ``tiers``: what it takes fetches to cost, by guesses from its machine and by what
    it has measured.
    """

    replica: Name
    model: Name
    stage: Name
    role: Name
    node: Name
    planner: Name = ""
    gateways: Count = 1
    queued_tokens: Count = 0
    running: Count = 0
    waiting: Count = 0
    max_seqs: Count = 0
    used_blocks: Count = 0
    total_blocks: Count = 0
    block_tokens: Count = 0
    max_batch_tokens: Count = 0
    step_seconds: Seconds = 0.0
    steps: Annotated[tuple[Step, ...], Meta(max_length=MAX_SAMPLES)] = ()
    fetches: Annotated[tuple[Fetch, ...], Meta(max_length=MAX_SAMPLES)] = ()
    served: Annotated[tuple[ServedBy, ...], Meta(max_length=MAX_SERVED)] = ()
    batch: Batch = Batch()
    adapters: Annotated[bytes, Meta(max_length=MAX_ADAPTERS * ADAPTER_BYTES)] = b""
    standing: Annotated[tuple[Standing, ...], Meta(max_length=MAX_STANDING)] = ()
    incoming_tokens: Count = 0
    owner: InboxAddress | None = None
    weights: Annotated[bytes, Meta(max_length=32)] = b""
    evicted: Keys = b""
    pool: Pool = Pool()
    leaving: bool = False
    zone: Name = ""
    tiers: Annotated[tuple[TierCost, ...], Meta(max_length=8)] = ()

    @property
    def busy(self) -> bool:
        return bool(self.queued_tokens or self.running or self.waiting)
