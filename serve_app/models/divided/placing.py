"""Experts on the ranks where they are wanted: counts what rows choose, and moves experts once a model is loaded."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.parallel.experts import Loads, Placement, in_order, keep_loads, place_experts
from serve_app.parallel.group import Group

log = logging.getLogger(__name__)
# Seconds between two times that counts are kept.
KEPT_S = 60.0


@dataclass(slots=True)
class Counts:
    """What rows have chosen since it was last kept in ``folder`` (None: it is not), as the file ``name``."""

    folder: Path | None = None
    name: str = ""
    of: dict[str, Tensor] = field(default_factory=dict)
    _kept: float = field(default_factory=time.monotonic)

    def start(self, module: str, experts: int, device: torch.device) -> Tensor:
        """Counts of a module's experts, int64 [experts]."""
        return self.of.setdefault(module, torch.zeros(experts, dtype=torch.int64, device=device))

    def look(self) -> None:
        """Keeps them if it is time."""
        if self.folder is not None and self.of and time.monotonic() - self._kept > KEPT_S:
            self.keep()

    def keep(self) -> None:
        self._kept = time.monotonic()
        if self.folder is None:
            return
        counted = {name: counts.tolist() for name, counts in self.of.items()}
        for counts in self.of.values():
            counts.zero_()
        if not any(any(counts) for counts in counted.values()):
            return
        try:
            keep_loads(self.folder, self.name, counted)
        except OSError as error:
            log.warning("what experts had to do is not kept: %s", error)
            self.folder = None


@dataclass(slots=True)
class Slots:
    """Where the experts of one module lie: ``table`` [experts, most copies] of slots over all ranks, those of an expert
    over and over; ``copies`` [experts] how many it has. ``count`` slots on each rank, and the experts in its ``own``.
    """

    count: int
    table: Tensor
    copies: Tensor
    own: list[int]

    @classmethod
    def of(cls, placement: Placement, part: int) -> Slots:
        found = placement.copies
        most = max(len(slots) for slots in found.values())
        rows = [[found[expert][n % len(found[expert])] for n in range(most)] for expert in sorted(found)]
        counts = [len(found[expert]) for expert in sorted(found)]
        return cls(len(placement.slots[0]), torch.tensor(rows), torch.tensor(counts), list(placement.slots[part]))

    def choose(self, experts: Tensor) -> Tensor:
        """The slots for ``experts`` [T, k]: rows take copies in turns."""
        if self.table.device != experts.device:  # a model goes to its device once it is read
            self.table, self.copies = self.table.to(experts.device), self.copies.to(experts.device)
        rows = torch.arange(len(experts), device=experts.device).unsqueeze(1)
        return self.table[experts, rows % self.copies[experts]]


@torch.no_grad()  # what is rounded to fewer bits later is written to, which tensors of inference mode do not take
def place_module(experts: Any, placement: Placement, group: Group) -> Slots:
    """Moves a module's experts, of which each rank has its share in order, to their slots. Every part calls it."""
    place = group.place
    each = len(placement.copies) // place.tensor
    sources = [[slot for slot in own if slot // each == place.part] for own in placement.slots]
    give = [expert - place.part * each for own in sources for expert in own]
    wanted = placement.slots[place.part]
    # What comes is in the order of its source, and there of slots.
    order = sorted(range(len(wanted)), key=lambda slot: (wanted[slot] // each, slot))
    take = [sum(expert // each == part for expert in wanted) for part in range(place.tensor)]
    back = torch.tensor(order).argsort()
    for key, weight in list(experts.named_parameters(recurse=False)):
        rows = weight.detach()[torch.tensor(give, dtype=torch.int64)]
        found = group.exchange(rows.flatten(1), [len(own) for own in sources], take)
        setattr(experts, key, nn.Parameter(found[back].view(-1, *weight.shape[1:]), requires_grad=False))
    return Slots.of(placement, place.part)


def placements(modules: dict[str, int], loads: Loads, group: Group, copies: int) -> dict[str, Placement]:
    """Of each of the ``modules`` with its number of experts for which there are ``loads``. Those of a stage's first
    part count, since files may change between two looks.
    """
    agreed: Loads = json.loads(group.told_parts(json.dumps(loads).encode()))
    return {
        name: place_experts(agreed[name], group.place.tensor, copies)
        for name, experts in modules.items()
        if len(agreed.get(name, ())) == experts and sum(agreed[name]) > 0
    }


def balance(found: dict[str, Placement], loads: Loads, tensor: int) -> str:
    """What the busiest rank has to do, in the mean over layers, before and after."""
    if not found:
        return "as in the files: nothing has been counted yet"
    was = [in_order(len(loads[name]), tensor).imbalance(loads[name]) for name in found]
    now = [placement.imbalance(loads[name]) for name, placement in found.items()]
    before, after = sum(was) / len(was), sum(now) / len(now)
    return f"the busiest rank has {after:.2f} of the mean to do, and in the order of the files {before:.2f}"
