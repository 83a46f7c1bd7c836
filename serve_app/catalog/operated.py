"""What an operator has said of models by hand while the server runs: records that were added, which models are to run,
how many replicas their stages may have, and which share of their requests another model answers. It is kept with the
state and holds after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Share:
    """``percent`` of a model's requests go to ``model``; "" for none."""

    model: str
    percent: float


@dataclass(slots=True, frozen=True)
class Operated:
    """Of one model. ``record``: the YAML text of a record that was added, "" for one that lies in a file. ``running``:
    None for as the settings have it. ``bounds``: replicas by stage, at least and at most. ``canary``: None for as the
    record has it, one without a model for none.
    """

    model: str
    record: str = ""
    running: bool | None = None
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    canary: Share | None = None


NO_CANARY = Share("", 0.0)
