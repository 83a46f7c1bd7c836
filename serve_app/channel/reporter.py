"""When a worker tells gateways of its load: soon after it changed, not too often, and now and then in any case."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from msgspec.structs import replace

from serve_app.channel.sender import TokenSender
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import LoadReport

# Not more often than this, however fast the steps are, and at least this often while nothing changes.
PERIOD_S = 0.1
HEARTBEAT_S = 2.0


class LoadReporter:
    """Tells subscribed gateways of a worker's load. ``measure`` gives the report of this moment.

    All calls belong in the sender's event loop. Costs nothing while nobody has subscribed.
    """

    def __init__(
        self,
        sender: TokenSender,
        measure: Callable[[], LoadReport],
        *,
        period_s: float = PERIOD_S,
        heartbeat_s: float = HEARTBEAT_S,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """``sent()``: what was last measured is on its way."""
        self._sent = sent
        self._sender = sender
        self._measure = measure
        self._period_s = period_s
        self._heartbeat_s = heartbeat_s
        self._last: LoadReport | None = None
        self._looked_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None

    def subscribe(self, address: InboxAddress, lease_s: float) -> None:
        """A gateway wants reports for the next ``lease_s`` seconds; asking again extends them."""
        if self._sender.subscribe(address, lease_s):
            self._send()  # whoever is new shall not wait for a change

    def changed(self) -> None:
        """Something happened that a gateway may want to know: sends soon, if a number is different then, and looks
        again as long as the worker is busy.
        """
        if self._timer is None and self._sender.subscribers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._looked_at + self._period_s), self._due)

    def close(self) -> None:
        for timer in (self._timer, self._beat):
            if timer is not None:
                timer.cancel()

    def _due(self) -> None:
        self._timer = None
        self._looked_at = asyncio.get_running_loop().time()
        report = self._measure()
        # Times wander with every step; they go along with the numbers that a choice depends on.
        if self._last is None or _counts(report) != _counts(self._last):
            self._send(report)
        if report.busy:
            self.changed()

    def _send(self, report: LoadReport | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if not self._sender.subscribers:
            self._last = None
            return
        self._last = self._measure() if report is None else report
        self._sender.report(self._last)
        self._sent()
        self._beat = loop.call_later(self._heartbeat_s, self._send)


def _counts(report: LoadReport) -> LoadReport:
    pool = report.pool._replace(evicted=b"")
    return replace(report, step_seconds=0.0, steps=(), fetches=(), served=(), evicted=b"", pool=pool, tiers=())
