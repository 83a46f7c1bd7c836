"""How far each worker has come with loading, kept in Ray's own key-value store: soft state that needs no actor."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

_NAMESPACE = b"serve_app_progress"


@dataclass(slots=True)
class LoadProgress:
    """The stage one worker of a model is in. ``since`` and ``at`` are Unix times in seconds."""

    model: str
    stage: str
    step: str
    since: float
    at: float
    done: int | None = None
    total: int | None = None

    @property
    def seconds(self) -> float:
        return self.at - self.since


def report_progress(
    model: str, stage: str, step: str, *, since: float, done: int | None = None, total: int | None = None
) -> None:
    """Called in a worker while it loads. Failures are swallowed: progress is a courtesy."""
    from ray.experimental.internal_kv import _internal_kv_put

    entry = LoadProgress(model, stage, step, since, time.time(), done, total)
    try:
        _internal_kv_put(f"{model}|{stage}".encode(), json.dumps(asdict(entry)).encode(), namespace=_NAMESPACE)
    except Exception:
        return


def read_progress() -> list[LoadProgress]:
    """All workers' progress, as last reported. Blocking, about a millisecond per entry."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    entries: list[LoadProgress] = []
    for key in _internal_kv_list(b"", namespace=_NAMESPACE):
        raw: Any = _internal_kv_get(key, namespace=_NAMESPACE)
        if raw:
            entries.append(LoadProgress(**json.loads(raw)))
    return sorted(entries, key=lambda e: (e.model, e.stage))
