"""Which rank holds which experts, by how much rows want them: hot ones lie on several ranks.

What rows have chosen is counted while a model serves, and kept in a folder; the next start places experts by it. Every
rank has the same number of slots, its share of the experts and so many ``copies``. A slot more goes to whatever expert
has most to do for each of its copies; then the busiest are dealt out first, each to the rank with least to do (as the
expert-parallel load balancer of DeepSeek, arXiv 2412.19437, section 3.4.1).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Rows for each expert, by the name of the experts' module.
Loads = dict[str, list[float]]
# How much of what was counted before is left each time that counts are kept.
KEEPS = 0.9


@dataclass(slots=True, frozen=True)
class Placement:
    """``slots``: the expert of each slot of each rank, all of them equally many."""

    slots: list[list[int]]

    @property
    def copies(self) -> dict[int, list[int]]:
        """Slots of each expert, numbered over all ranks, in their order."""
        found: dict[int, list[int]] = {}
        for slot, expert in enumerate(expert for rank in self.slots for expert in rank):
            found.setdefault(expert, []).append(slot)
        return found

    def imbalance(self, loads: Sequence[float]) -> float:
        """What the busiest rank has to do, as a multiple of the mean; rows are divided evenly among an expert's
        copies.
        """
        copies = {expert: len(slots) for expert, slots in self.copies.items()}
        work = [sum(loads[expert] / copies[expert] for expert in rank) for rank in self.slots]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0


def in_order(experts: int, ranks: int) -> Placement:
    """As they lie in files."""
    each = experts // ranks
    return Placement([list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)])


def place_experts(loads: Sequence[float], ranks: int, copies: int) -> Placement:
    """``copies``: slots of each rank beyond its share of the experts."""
    each = len(loads) // ranks + copies
    counts = [1] * len(loads)
    for _ in range(ranks * copies):
        free = [expert for expert in range(len(loads)) if counts[expert] < ranks] or list(range(len(loads)))
        counts[max(free, key=lambda expert: (loads[expert] / counts[expert], -expert))] += 1
    shares = [(loads[expert] / counts[expert], expert) for expert in range(len(loads)) for _ in range(counts[expert])]
    slots: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for share, expert in sorted(shares, key=lambda item: (-item[0], item[1])):
        room = [rank for rank in range(ranks) if len(slots[rank]) < each]
        # Two copies on one rank would share nothing.
        apart = [rank for rank in room if expert not in slots[rank]] or room
        rank = min(apart, key=lambda rank: (work[rank], len(slots[rank]), rank))
        slots[rank].append(expert)
        work[rank] += share
    return Placement([sorted(rank) for rank in slots])


def folder_of(home: str, model: str) -> Path:
    """Where the counts of a model lie."""
    return Path(home) / "experts" / model.strip("@/").replace("/", "--")


def read_loads(folder: Path) -> Loads:
    """What has been counted; nothing of a file that can't be read."""
    found: Loads = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            for name, counts in json.loads(file.read_text(encoding="utf-8")).items():
                found[name] = [max(0.0, float(count)) for count in counts]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is no record of what experts had to do: %s", file, error)
    return found


def keep_loads(folder: Path, name: str, counted: Mapping[str, Sequence[float]]) -> None:
    """Adds to the file ``name`` what has been counted since; what was before weighs less each time."""
    folder.mkdir(parents=True, exist_ok=True)
    before = read_loads(folder)
    found: Loads = {}
    for module, counts in counted.items():
        old = before.get(module, [])
        old = old if len(old) == len(counts) else [0.0] * len(counts)
        found[module] = [round(KEEPS * was + now, 1) for was, now in zip(old, counts, strict=True)]
    file = folder / f"{name}.json"
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(found), encoding="utf-8")
        fresh.replace(file)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
