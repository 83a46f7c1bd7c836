"""Where one rank of a worker stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Place:
    """Rank ``rank`` of a worker whose layers are divided among ``pipeline`` stages, and each layer among ``tensor``
    ranks::

        rank   0 1 2 3 4 5 6 7      tensor 4, pipeline 2
        stage  0 0 0 0 1 1 1 1
        part   0 1 2 3 0 1 2 3
    """

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0
    # Whether each rank of a stage holds some of its experts whole; else it holds a part of each.
    whole_experts: bool = False
    # Whether rows travel to these: one of :data:`serve_app.parallel.dispatch.WAYS`.
    dispatch: str = "never"
    # Slots of each rank for experts beyond its share of them (:mod:`serve_app.parallel.experts`).
    copies: int = 0

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def part(self) -> int:
        """Which part of each of its layers it has."""
        return self.rank % self.tensor

    @property
    def first(self) -> bool:
        """Whether its stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether its stage gives logits."""
        return self.stage == self.pipeline - 1

    @property
    def last_ranks(self) -> range:
        """Those of the last stage."""
        return range(self.ranks - self.tensor, self.ranks)

    def share(self, size: int) -> range:
        """This rank's part of ``size`` columns, heads or rows: the last ranks may have fewer, or none."""
        each = -(-size // self.tensor)
        return range(min(size, self.part * each), min(size, (self.part + 1) * each))

    @property
    def division(self) -> str:
        """What it is a place of, for names."""
        return f"{self.tensor}x{self.pipeline}" + ("e" if self.whole_experts else "")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"
