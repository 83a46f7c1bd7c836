"""Where a request's adapter is in memory, and what loading it elsewhere takes."""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

from serve_app.routing.costs import CostModel
from serve_app.routing.types import RouteRequest, WorkerLoad

# For so long an adapter is taken to be where a request took it, whatever the worker reports; and how many are known.
TAKEN_S = 2.0
TAKEN = 10_000


class AdapterPlaces:
    """What workers report, and what requests have taken to them since."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._taken: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def loading_s(self, request: RouteRequest, load: WorkerLoad, now: float) -> float:
        """Seconds until a worker has the request's adapter in memory."""
        if not request.adapter or request.adapter in load.adapters:
            return 0.0
        taken = self._taken.get((load.worker, request.adapter))
        if taken is not None and now - taken < TAKEN_S:
            return 0.0
        return self._costs.fetch_seconds("adapter", request.adapter_bytes)

    def takes(self, adapter: bytes, workers: set[str], now: float) -> None:
        """A request takes the adapter to ``workers``."""
        for worker in workers:
            self._taken[worker, adapter] = now
            self._taken.move_to_end((worker, adapter))
        while len(self._taken) > TAKEN:
            self._taken.popitem(last=False)


def order(adapter: bytes, worker: str) -> float:
    """In [0, 1): which worker an adapter comes to first, other things being equal. All gateways agree, and a fleet
    shares many adapters out.
    """
    return crc32(adapter + worker.encode()) / 2**32
