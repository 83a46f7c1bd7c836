"""Reports of runners of batches: each writes one a second while it works, and gateways read those that are fresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# A runner that has not reported for so long does nothing any more; its counters are told for a while longer, so that
# whoever reads metrics sees the last of them.
FRESH_S = 5.0
COUNTED_S = 90.0
KEPT_S = 600.0


@dataclass(slots=True, frozen=True)
class Report:
    """``at``: unix seconds. ``live``, ``counted``: as gateways tell one another, see
    :meth:`serve_app.gateway.history.History.told` and :func:`serve_app.gateway.prometheus.told`.
    """

    runner: str
    at: float
    live: bytes
    counted: bytes


class ReportStore(Protocol):
    """All calls block and raise `Away`."""

    def put(self, report: Report) -> None: ...

    def since(self, at: float) -> list[Report]: ...

    def trim(self, now: float) -> None: ...
