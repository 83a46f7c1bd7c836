"""A training that can be begun, interrupted and gone on with, by the folder that holds its state."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

STATE = ".train"
# What may be another when a training goes on.
FREE = ("out", "threads", "save_every", "stop_at")


class TrainingRefused(ValueError):
    """Training can't begin or go on; the text says what to change."""


def open_state(options: Any, out: Path, *, free: Iterable[str] = ()) -> Path:
    """The folder of a training's state in ``out``. ``options`` (a dataclass) must be those it was begun with, except
    :data:`FREE` and ``free``. Raises :class:`TrainingRefused`.
    """
    state = out / STATE
    state.mkdir(parents=True, exist_ok=True)
    (state / ".gitignore").write_text("*\n")
    may_change = {*FREE, *free}
    told = {k: v for k, v in json.loads(json.dumps(asdict(options))).items() if k not in may_change}
    file = state / "options.json"
    if file.exists() and (before := json.loads(file.read_text())) != told:
        changed = ", ".join(sorted(k for k in told if before.get(k) != told[k]))
        raise TrainingRefused(f"{out} was begun with another {changed}; use another --out, or delete {state}")
    file.write_text(json.dumps(told, indent=2) + "\n")
    return state
