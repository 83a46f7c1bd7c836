"""A worker's load as gateways hear of it."""

from __future__ import annotations

import time
from collections import Counter, deque
from hashlib import blake2b
from typing import Any, NamedTuple

from serve_app.channel.reporter import LoadReporter
from serve_app.channel.sender import TokenSender
from serve_app.channel.served import ServedLedger, gateway_name
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import (
    ADAPTER_BYTES,
    KEY_BYTES,
    MAX_ADAPTERS,
    MAX_EVICTED,
    MAX_SAMPLES,
    MAX_STANDING,
    Batch,
    Fetch,
    LoadReport,
    Pool,
    Standing,
    Step,
)
from serve_app.wire.replicas import Listen
from serve_app.worker.adapters import Adapters
from serve_app.worker.kv_read import PoolReader
from serve_app.worker.pool_watch import PoolWatch

# A gateway that has been there for so long has its share of the models.
SETTLED_MINUTES = 15


class _Wish(NamedTuple):
    """What a gateway wishes this worker to prefer, until when, where it listens, and since which minute."""

    until: float
    role: str | None
    inbox: InboxAddress
    since: int


class EngineLoad:
    """Measures one engine and tells every gateway that has subscribed; all on the worker's event loop."""

    def __init__(
        self,
        model: str,
        stage: str,
        node: str,
        engine: Any,
        sender: TokenSender,
        fetches: deque[Fetch],
        adapters: Adapters | None = None,
        weights: bytes = b"",
        pool: PoolWatch | None = None,
        zone: str = "",
    ) -> None:
        """``fetches``, and what ``adapters`` have loaded, are emptied with every report. ``weights``: what the keys of
        its K/V start from; ``pool``: its node's, if it publishes; ``zone``: of its node.
        """
        # Who brings K/V here.
        self.reads: PoolReader | None = None
        self._fetches = fetches
        self._adapters = adapters
        self.served = ServedLedger()
        self._sender = sender
        self._model = model
        self._stage = stage
        self._node = node
        self._zone = zone
        self._engine = engine
        self._replica = ""
        self._role = ""
        self._weights = weights
        self._pool = pool
        # Taken from the engine and the reader, and in no report that has been sent yet.
        self._evicted: list[bytes] = []
        self._steps: deque[Step] = deque(maxlen=MAX_SAMPLES)
        self._fetched: deque[Fetch] = deque(maxlen=MAX_SAMPLES)
        self._leaving = False
        # What each gateway wishes this worker to prefer, and until when.
        self._wishes: dict[str, _Wish] = {}
        self._reporter = LoadReporter(sender, self._measure, sent=self._told)

    @property
    def replica(self) -> str:
        """As routing names this worker; "" until a gateway listens."""
        return self._replica

    def subscribe(self, call: Listen) -> None:
        """Several gateways may wish for several things. One is followed, the same at all workers of the model: of those
        that began first, which have different ranks for each model. One that comes later knows nothing of what caches
        hold, of sessions and of the load, until it has been there for a while.
        """
        self._replica = call.replica
        self._leaving |= call.leaving
        if self._pool is not None:
            self._pool.start(self._reporter.changed)
        if call.plans:
            self._wishes[gateway_name(call.inbox)] = _Wish(
                time.monotonic() + call.lease_s, call.wish, call.inbox, call.since
            )
        planner = self._planner()
        self._role = (planner and self._wishes[planner].role) or self._role or call.role
        self._reporter.subscribe(call.inbox, call.lease_s)
        self._reporter.changed()

    def close(self) -> None:
        self._reporter.close()
        if self._pool is not None:
            self._pool.close()

    def changed(self) -> None:
        self._reporter.changed()

    def _planner(self) -> str:
        """The gateway whose wish counts, of those that are still there; "" if none is."""
        now = time.monotonic()
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}
        there = [name for name, wish in self._wishes.items() if self._sender.connected(wish.inbox)]
        return min(there or self._wishes, key=self._rank, default="")

    def _rank(self, gateway: str) -> tuple[int, bytes]:
        # Those that have been there for a while are alike, so that a restart one by one leaves no model's to the last.
        since = max(self._wishes[gateway].since, int(time.time() // 60) - SETTLED_MINUTES)
        return since, blake2b(f"{self._model}\0{gateway}".encode(), digest_size=8).digest()

    def _measure(self) -> LoadReport:
        from serve_app.engine.blocks import BLOCK_TOKENS

        # Read beside the engine's thread: lists are copied in one piece, and a number may be a step old.
        scheduler = self._engine.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        planner = self._planner()
        self._steps.extend(Step(*sample) for sample in self._engine.meter.take())
        return LoadReport(
            replica=self._replica,
            model=self._model,
            stage=self._stage,
            role=self._role or "mixed",
            node=self._node,
            planner=planner,
            gateways=len(self._wishes),
            queued_tokens=scheduler.queued_tokens,
            # A prompt that is computed for another worker is in the queued tokens; it never becomes a stream here.
            running=sum(not r.prefill_only for r in running),
            waiting=sum(not r.prefill_only for r in waiting),
            max_seqs=scheduler.max_num_seqs,
            used_blocks=scheduler.blocks.used_blocks,
            total_blocks=scheduler.blocks.num_blocks - 1,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=scheduler.step_tokens,
            step_seconds=self._engine.meter.mean_seconds,
            steps=tuple(self._steps),
            fetches=self._take_fetches(),
            # A gateway that is alone knows what it has served.
            served=self.served.recent() if self._sender.subscribers > 1 else (),
            batch=self._batch(running, waiting),
            adapters=self._held(),
            standing=_standing([*running, *waiting]) if waiting or len(running) >= scheduler.max_num_seqs else (),
            incoming_tokens=self.reads.on_the_way() if self.reads is not None else 0,
            owner=self._wishes[planner].inbox if planner else None,
            weights=self._weights,
            evicted=self._gone(),
            pool=Pool() if self._pool is None else self._pool.take(),
            leaving=self._leaving,
            zone=self._zone,
            tiers=self.reads.tiers() if self.reads is not None else (),
        )

    def _gone(self) -> bytes:
        """Keys that the engine's cache has let go and does not hold again."""
        blocks, waiting = self._engine.scheduler.blocks, self._evicted
        while blocks.evicted and len(waiting) < MAX_EVICTED:
            waiting.append(blocks.evicted.popleft())
        return b"".join(key[:KEY_BYTES] for key in waiting if not blocks.holds(key))

    def _told(self) -> None:
        for told in (self._evicted, self._steps, self._fetched):
            told.clear()
        if self._pool is not None:
            self._pool.sent()

    def _held(self) -> bytes:
        if self._adapters is None:
            return b""
        return b"".join(bytes.fromhex(digest)[:ADAPTER_BYTES] for digest in self._adapters.held[:MAX_ADAPTERS])

    def _batch(self, running: list[Any], waiting: list[Any]) -> Batch:
        if not any(r.batch for r in (*running, *waiting)):
            return Batch()
        scheduler = self._engine.scheduler
        batch_running, batch_waiting = [r for r in running if r.batch], [r for r in waiting if r.batch]
        # A prefix that a real-time request shares is not to be had.
        kept = {block for r in running if not r.batch for block in list(r.blocks)}
        return Batch(
            scheduler.queued_of([*batch_running, *batch_waiting]),
            sum(not r.prefill_only for r in batch_running),
            sum(not r.prefill_only for r in batch_waiting),
            max(0, scheduler.blocks.used_blocks - len(kept)),
        )

    def _take_fetches(self) -> tuple[Fetch, ...]:
        for measured in (self._fetches, *([self._adapters.loads] if self._adapters is not None else [])):
            self._fetched.extend(measured)
            measured.clear()
        return tuple(self._fetched)


def _standing(requests: list[Any]) -> tuple[Standing, ...]:
    """By tenant and class. The last request's weight is the tenant's: it may have changed since the others came."""
    streams = [r for r in requests if not r.prefill_only]
    weights = {(r.tenant.hex(), "batch" if r.batch else "realtime"): r.weight for r in streams}
    counts = Counter((r.tenant.hex(), "batch" if r.batch else "realtime") for r in streams)
    return tuple(Standing(*who, count, weights[who]) for who, count in counts.most_common(MAX_STANDING))
