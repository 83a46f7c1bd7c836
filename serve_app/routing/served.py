"""What other gateways have served, as workers report it, charged to tenants that this gateway knows as well."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from serve_app.routing.types import Priority

# Tenants remembered: one that is forgotten is known again with its next request.
_TENANTS = 10_000
# Counts remembered per worker beyond those in its last report.
_COUNTS = 4096

Charge = Callable[[Priority, str, int, int, int], None]


class ServedCount(NamedTuple):
    """Tokens that a worker has served to one tenant in one class by way of one gateway.

    ``number`` names the count; a worker uses a number once. ``tenant`` is the opaque id that workers have.
    """

    number: int
    tenant: str
    priority: str
    uncached: int
    cached: int
    output: int

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.uncached, self.cached, self.output


class ServedElsewhere:
    """Calls ``charge(priority, account, uncached, cached, output)`` with what other gateways have served.

    A gateway that has just come up begins with the counts it finds: what a worker counted before is not charged.
    """

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._accounts: OrderedDict[str, str] = OrderedDict()
        self._seen: dict[str, dict[int, ServedCount]] = {}  # by worker process, then number

    def know(self, tenant: str, account: str) -> None:
        """``tenant``: the opaque id that workers have of the account."""
        self._accounts[tenant] = account
        self._accounts.move_to_end(tenant)
        if len(self._accounts) > _TENANTS:
            self._accounts.popitem(last=False)

    def name(self, tenant: str) -> str:
        """The account that workers know as ``tenant``; one that this gateway has not met goes by that id."""
        return self._accounts.get(tenant, tenant)

    def take(self, process: str, counts: Sequence[ServedCount]) -> None:
        """Charges what has been served since the process last reported. ``counts`` are other gateways' only."""
        seen = self._seen.get(process)
        now = {count.number: count for count in counts}
        if seen is None or len(seen) > _COUNTS:
            self._seen[process] = now
            return
        for count in counts:
            account = self._accounts.get(count.tenant)
            if account is None or count.priority not in ("realtime", "batch"):
                continue
            before = seen[count.number].tokens if count.number in seen else (0, 0, 0)
            new = [max(0, total - old) for total, old in zip(count.tokens, before, strict=True)]
            if any(new):
                self._charge(count.priority, account, *new)  # type: ignore[arg-type]
        seen.update(now)

    def lost(self, process: str) -> None:
        """The process is gone; its successor's counts begin anew."""
        self._seen.pop(process, None)
