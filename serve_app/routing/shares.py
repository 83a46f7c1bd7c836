"""What unequal workers can take of a model's work, and which of them should prefer prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from serve_app.routing.types import WorkerLoad

# Shares that are less apart than this count as equal: measured speeds are never quite the same.
ALIKE = 0.15
_LEAST = 1e-9


@dataclass(slots=True, frozen=True)
class Share:
    """Of all prompts that arrive, and of all streams, what one worker could take alone; may be more than all."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, prefill: float, decode: float) -> Share:
        """``prefill``, ``decode``: how many workers like this one each would need."""
        return cls(1.0 / max(prefill, _LEAST), 1.0 / max(decode, _LEAST))


def fullest(prefill: Collection[str], shares: Mapping[str, Share]) -> float:
    """How loaded the more loaded stage is if these workers take the prompts and the others the streams."""
    first = sum(share.prefill for name, share in shares.items() if name in prefill)
    second = sum(share.decode for name, share in shares.items() if name not in prefill)
    return _load(first, second)


def best_split(workers: Mapping[str, WorkerLoad], shares: Mapping[str, Share]) -> set[str]:
    """The workers that should prefer prompts; at least one of each.

    Those that do so now, and more or fewer where that is worth it: first those that give up least of decoding for it.
    Only where other workers promise clearly more, as where those with prompts have the memory, they change places.
    """

    def kept(name: str) -> tuple[int, int, str]:
        # Those that have the role, and of these the ones with most to finish, so that the fewest move.
        load = workers[name]
        return (0, -load.queued_prefill_tokens, name) if load.role == "prefill" else (1, load.running, name)

    if all(share.prefill >= 1.0 / (2 * _LEAST) and share.decode >= 1.0 / (2 * _LEAST) for share in shares.values()):
        return set(sorted(workers, key=kept)[: max(1, len(workers) // 2)])
    given = {name: _bucket(share.decode / share.prefill) for name, share in shares.items()}
    by_role = _best_prefix(
        sorted(workers, key=lambda name: (workers[name].role != "prefill", given[name], kept(name))), shares
    )
    by_gift = _best_prefix(sorted(workers, key=lambda name: (given[name], kept(name))), shares)
    return by_gift if fullest(by_gift, shares) < fullest(by_role, shares) * (1.0 - ALIKE) else by_role


def _best_prefix(order: list[str], shares: Mapping[str, Share]) -> set[str]:
    """As many from the front as make the more loaded stage least loaded."""
    first, second = 0.0, sum(share.decode for share in shares.values())
    best, best_load = 1, math.inf
    for count, name in enumerate(order[:-1], 1):
        first, second = first + shares[name].prefill, second - shares[name].decode
        load = _load(first, second)
        if load <= best_load:
            best, best_load = count, load
    return set(order[:best])


def _load(prefill: float, decode: float) -> float:
    return max(1.0 / max(prefill, _LEAST), 1.0 / max(decode, _LEAST))


def _bucket(value: float) -> int:
    return round(math.log(value) / math.log(1.0 + ALIKE))
