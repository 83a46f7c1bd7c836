"""What other gateways have served, heard from workers and charged to tenants that are known here as well."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from serve_app.channel.load import LoadReport
from serve_app.routing.types import Priority

# Tenants remembered: one that is forgotten is known again with its next request.
_TENANTS = 10_000
# Counts remembered per worker beyond those in its last report.
_COUNTS = 4096

Charge = Callable[[Priority, str, int, int, int], None]


class ServedElsewhere:
    """``charge(priority, account, uncached, cached, output)`` is called with what others than ``own()`` have served.

    A gateway that has just come up begins with the counts it finds; what a worker counted before is not charged.
    """

    def __init__(self, own: Callable[[], str], charge: Charge) -> None:
        self._own = own
        self._charge = charge
        self._accounts: OrderedDict[str, str] = OrderedDict()
        self._seen: dict[str, dict[int, tuple[int, int, int]]] = {}  # by worker process, then number

    def know(self, tenant: str, account: str) -> None:
        """``tenant``: the opaque id that workers have of the account."""
        self._accounts[tenant] = account
        self._accounts.move_to_end(tenant)
        if len(self._accounts) > _TENANTS:
            self._accounts.popitem(last=False)

    def take(self, process: str, report: LoadReport) -> None:
        """Charges what has been served since the process last reported."""
        seen = self._seen.get(process)
        own = self._own()
        now = {entry[0]: entry[4:] for entry in report.served}
        if seen is None or len(seen) > _COUNTS:
            self._seen[process] = now
        else:
            for number, gateway, tenant, priority, *counts in report.served:
                account = self._accounts.get(tenant)
                if account is None or gateway == own or priority not in ("realtime", "batch"):
                    continue
                before = seen.get(number, (0, 0, 0))
                new = [max(0, total - old) for total, old in zip(counts, before, strict=True)]
                if any(new):
                    self._charge(priority, account, *new)  # type: ignore[arg-type]
            seen.update(now)

    def lost(self, process: str) -> None:
        """The process is gone; a successor starts its counts anew."""
        self._seen.pop(process, None)
