"""What one gateway counts of other clusters, for metrics and health."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Seen:
    """``latency``: seconds of a round trip; ``why``: it is not reachable, "" while it is."""

    latency: float = 0.0
    why: str = "not asked yet"

    @property
    def reachable(self) -> bool:
        return not self.why


@dataclass(slots=True)
class Counts:
    """``passed``: by neighbour, model and how it went: served, refused (before its first token, also by silence),
    lost (behind it) or left by its client. ``received``: by account and model.
    """

    passed: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    seen: dict[str, Seen] = field(default_factory=dict)

    def health(self) -> dict[str, Any]:
        """For who has no key: neither names nor places. Empty without neighbours."""
        if not self.seen:
            return {}
        reachable = sum(one.reachable for one in self.seen.values())
        return {"neighbours": {"listed": len(self.seen), "reachable": reachable}}

    def shown(self) -> dict[str, Any]:
        """For the operator."""
        passed: dict[str, list[dict[str, Any]]] = {}
        for (name, model, how), count in self.passed.items():
            passed.setdefault(name, []).append({"model": model, "how": how, "requests": count})
        return {
            "neighbours": [
                {
                    "name": name,
                    "reachable": one.reachable,
                    **({"why": one.why} if one.why else {}),
                    "latency_ms": round(one.latency * 1e3, 2),
                    "passed": passed.get(name, []),
                }
                for name, one in self.seen.items()
            ],
            "received": [
                {"account": account, "model": model, "requests": count}
                for (account, model), count in self.received.items()
            ],
        }

    def told(self) -> tuple[list[tuple[str, bool, float]], list[tuple[str, str, str, int]], list[tuple[str, str, int]]]:
        """For :mod:`serve_app.gateway.prometheus`."""
        seen = [(name, one.reachable, one.latency) for name, one in self.seen.items()]
        passed = [(*key, count) for key, count in self.passed.items()]
        return seen, passed, [(*key, count) for key, count in self.received.items()]
