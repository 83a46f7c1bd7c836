"""The plan: which split of a model over so many devices, what lies where, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from serve_app.costs.states import NoRoom, Slots, share_out, slot_bytes
from serve_app.planning.cache import BLOCK_TOKENS
from serve_app.planning.devices import Device
from serve_app.planning.model import Model
from serve_app.planning.ranks import DoesNotDivide, Rank, Split, divide
from serve_app.planning.rates import Rates, rates
from serve_app.planning.tensors import VISION

NOUNS = {"image": "pictures", "audio": "sounds"}
# Texts at a time for which a split is judged, if they fit.
WANTED_STREAMS = 64


class DoesNotFit(ValueError):
    """No split of the model fits the devices; the text says what is missing."""


@dataclass(slots=True, frozen=True)
class ServingTarget:
    """``count`` devices of which a program may use ``utilization`` (0..1); a step has at most ``batch_tokens`` rows of
    which ``sequences`` are sampled; rates are for texts of ``context`` tokens.
    """

    device: Device
    count: int = 1
    utilization: float = 0.9
    batch_tokens: int = 2048
    sequences: int = 64
    context: int = 8192
    kv_cache_bytes: int = 0  # per rank; 0: what is left


@dataclass(slots=True)
class Plan:
    """``left``: bytes for K/V of each stage's fullest rank."""

    model: Model
    asked: ServingTarget
    split: Split
    ranks: list[Rank]
    left: list[int]
    rates: Rates

    @property
    def usable(self) -> int:
        """Bytes of a device that a worker may use."""
        return int(self.asked.device.memory * self.asked.utilization)

    @property
    def left_bytes(self) -> int:
        """For K/V on all ranks of a replica."""
        return sum(self.left) * self.split.tensor

    @property
    def unused_bytes(self) -> int:
        """Of a replica's ranks beside the first, which have no larger caches for not having what sees and hears."""
        if self.asked.kv_cache_bytes:
            return 0
        return (self.split.tensor - 1) * (self.ranks[0].weights.get(VISION, 0) + self.ranks[0].media_bytes)

    @property
    def token_bytes(self) -> int:
        """K/V of one token as the engine stores it: of every layer, heads that lie on several ranks counted once."""
        return sum(cache.token_bytes for cache in self.model.caches)

    @property
    def far_token_bytes(self) -> int:
        """Of a token behind which no window or chunk ends: of layers without one."""
        return sum(cache.token_bytes for cache in self.model.caches if not cache.bound)

    @property
    def tokens(self) -> int:
        """That fit, every layer keeping every token, in whole blocks; the first block is nobody's."""
        return min(self._tokens_of(stage) for stage in range(len(self.ranks)))

    @property
    def tokens_of_one_text(self) -> int:
        """That fit in one text whose windowed and chunked layers keep what queries look back to."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._holds(1, middle) else (low, middle - 1)
        return low

    def streams(self, context: int) -> int:
        """Texts of ``context`` tokens that fit at the same time, every layer keeping every token."""
        fit = self.tokens // context
        return min(fit, self.slots.texts) if self.model.state_bytes else fit

    @property
    def slots(self) -> Slots:
        """Of states, and how many texts may run with them; none of a model that keeps none."""
        if not self.model.state_bytes:
            return Slots(0, self.asked.sequences)
        return share_out(min(self.left), self._slot_bytes, self.asked.sequences, alone=not self.token_bytes)

    @property
    def _slot_bytes(self) -> int:
        """Of the states of a text, on the ranks of the stage that keeps most of them; all ranks of a stage do."""
        return max(sum(each.state for each in self.model.caches[rank.first : rank.last]) for rank in self.ranks)

    def _tokens_of(self, stage: int) -> int:
        rank = self.ranks[stage]
        caches = self.model.caches[rank.first : rank.last]
        block = BLOCK_TOKENS * sum(cache.rank_bytes(self.split.tensor) for cache in caches)
        left = self.left[stage] - (slot_bytes(self.slots.count, self._slot_bytes) if self.model.state_bytes else 0)
        return max(0, left // block - 1) * BLOCK_TOKENS if block else 1 << 40

    def _holds(self, texts: int, tokens: int) -> bool:
        for rank, left in zip(self.ranks, self.left, strict=True):
            caches = self.model.caches[rank.first : rank.last]
            if texts * sum(cache.text_bytes(tokens, self.split.tensor) for cache in caches) > left:
                return False
        return True


def splits(count: int) -> Iterator[Split]:
    """Every way to divide ``count`` devices into replicas of tensor ranks and pipeline stages."""
    for tensor in _divisors(count):
        for pipeline in _divisors(count // tensor):
            replicas = count // tensor // pipeline
            yield Split(tensor, pipeline, False, replicas)
            if tensor > 1:
                yield Split(tensor, pipeline, True, replicas)


def make_plan(model: Model, asked: ServingTarget, split: Split) -> Plan:
    """The plan of one split. Raises :class:`DoesNotDivide` and :class:`DoesNotFit`."""
    if split.expert and not model.experts:
        raise DoesNotDivide(f"{model.name} has no experts to divide")
    device = asked.device
    ranks = divide(model, split, batch_tokens=asked.batch_tokens, sampled=asked.sequences, cpu=device.cpu)
    ranks[0].media = media_bytes(model, cpu=device.cpu)
    left = []
    for rank in ranks:
        room = int(device.memory * asked.utilization) - rank.weight_bytes - rank.activations - device.reserve
        room -= rank.media_bytes
        if room < asked.kv_cache_bytes or room <= 0:
            missing = (max(asked.kv_cache_bytes, 1) - room) / 2**30
            raise DoesNotFit(
                f"{split}: a rank needs {rank.weight_bytes / 2**30:.1f} GiB for weights{_encoding(rank)} and "
                f"{rank.activations / 2**30:.2f} GiB for activations, {missing:.1f} GiB more than "
                f"{asked.utilization:.0%} of {device.memory / 2**30:.1f} GiB leave"
            )
        # Before there is a cache.
        most = int(device.memory * asked.utilization) - device.reserve
        if rank.weight_bytes + rank.passing > most:
            raise DoesNotFit(
                f"{split}: a rank needs {(rank.weight_bytes + rank.passing) / 2**30:.1f} GiB while it loads, until its "
                f"weights are rounded, and {most / 2**30:.1f} GiB are there"
            )
        left.append(asked.kv_cache_bytes or room)
    plan = Plan(model, asked, split, ranks, left, Rates(0, 0, asked.context, 0, 0))
    try:
        streams = min(WANTED_STREAMS, asked.sequences, plan.streams(asked.context))
    except NoRoom as reason:
        raise DoesNotFit(f"{split}: {reason}") from None
    plan.rates = rates(model, split, ranks, device, streams=streams, context=asked.context)
    return plan


def media_bytes(model: Model, *, cpu: bool) -> dict[str, int]:
    """What the first rank has beside weights for what it sees and hears, by name."""
    found: dict[str, int] = {}
    for medium, encoding in model.media.items():
        for name, size in encoding.on_device(cpu=cpu).items():
            found[f"{NOUNS[medium]}, {name}"] = size
    return found


def best_plan(model: Model, asked: ServingTarget, *, prefill: bool = False) -> Plan:
    """Of the splits that fit at least one text, the one of most tokens per second on all devices together, of answers
    or with ``prefill`` of prompts; of equals the one with most room for K/V. Raises :class:`DoesNotFit`.
    """
    found: list[Plan] = []
    reasons: list[str] = []
    for split in splits(asked.count):
        try:
            plan = make_plan(model, asked, split)
        except (DoesNotDivide, DoesNotFit) as reason:
            reasons.append(str(reason))
            continue
        found.append(plan)
    if not found:
        raise DoesNotFit(f"{model.name} does not fit {asked.count} x {asked.device.name}. " + ". ".join(reasons[-3:]))

    def worth(plan: Plan) -> tuple[int, int]:
        rate = plan.rates.prefill if prefill else plan.rates.decode
        return round(rate * plan.split.replicas), plan.left_bytes

    return max(found, key=worth)


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything, in bytes, tokens and tokens per second."""
    model, asked, split = plan.model, plan.asked, plan.split
    return {
        "model": model.name,
        "wanted": {name: getattr(model.wanted, name) for name in ("adapters", "quantization", "kv_cache_dtype")},
        "device": {
            "name": asked.device.name, "count": asked.count, "memory": asked.device.memory,
            "utilization": asked.utilization, "reserve": asked.device.reserve,
        },
        "split": {
            "tensor": split.tensor, "pipeline": split.pipeline, "experts_whole": split.expert,
            "replicas": split.replicas,
        },
        "weights": {
            "bytes": model.weight_bytes, "values": model.values, "active_values": int(model.active_values),
            "by_role": model.by_role(), "not_served": model.dropped,
        },
        "ranks": [
            {
                "layers": [rank.first, rank.last], "weights": rank.weights, "weight_bytes": rank.weight_bytes,
                "copies": rank.copies,
                "while_loading": rank.passing, "activations": rank.activations, "media": rank.media, "kv_cache": left,
            }
            for rank, left in zip(plan.ranks, plan.left, strict=True)
        ],
        "kv_cache": {
            "bytes": plan.left_bytes, "bytes_per_token": plan.token_bytes,
            "bytes_per_far_token": plan.far_token_bytes, "tokens": plan.tokens,
            "tokens_of_one_text": plan.tokens_of_one_text, "block_tokens": BLOCK_TOKENS,
            "streams": plan.streams(asked.context), "context": asked.context,
            "unused_beside": plan.unused_bytes,
            "state_bytes_per_text": model.state_bytes, "states": plan.slots.count, "texts": plan.slots.texts,
        },
        "rates": {
            "single": round(plan.rates.single, 1), "streams": plan.rates.streams,
            "decode": round(plan.rates.decode, 1), "prefill": round(plan.rates.prefill, 1),
        },
    }  # fmt: skip


def _encoding(rank: Rank) -> str:
    return f", {rank.media_bytes / 2**30:.2f} GiB for pictures and sounds" if rank.media else ""


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
