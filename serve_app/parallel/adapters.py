"""Adapters on several ranks: rank 0 reads one, and every rank has its part of it in the same place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.parallel.link import Leader
from serve_app.wire.ranks import RankAdapter


@dataclass(slots=True)
class WholeAdapter:
    """``own`` is what rank 0's bank made of the two files, which the others get."""

    own: Any
    config: bytes
    weights: bytes

    @property
    def bytes(self) -> int:
        return self.own.bytes + len(self.weights)


class GroupBank:
    """Stands where rank 0's own ``bank`` stood (``serve_app.models.adapters.AdapterBank``). Files go to the other ranks
    when an adapter gets a place: a few of them have one, and only those take memory there.
    """

    form = ""  # each rank packs for itself

    def __init__(self, bank: Any, leader: Leader) -> None:
        self._bank, self._leader = bank, leader

    @property
    def places(self) -> int:
        return self._bank.places

    def read(self, config: bytes, weights: bytes | Path) -> WholeAdapter:
        """Raises ``AdapterRefused``, as the bank does."""
        data = weights.read_bytes() if isinstance(weights, Path) else weights
        return WholeAdapter(self._bank.read(config, data), config, data)

    def put(self, place: int, prepared: WholeAdapter) -> None:
        """Between two steps."""
        self._leader.tell(RankAdapter(place, prepared.config, prepared.weights))
        self._bank.put(place, prepared.own)

    def clear(self, place: int) -> None:
        """Between two steps."""
        self._leader.tell(RankAdapter(place))
        self._bank.clear(place)
