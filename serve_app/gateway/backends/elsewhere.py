"""Where a request may be served instead of by this cluster's workers. Nothing is, unless a gateway has neighbours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.routing.types import RouteRequest
from serve_app.tasks.backend import Prepared
from serve_app.tasks.work import Work
from serve_app.wire.tokens import TokenItem


class Passed(Protocol):
    """A request that is served elsewhere; its first token is there."""

    def items(self) -> AsyncIterator[TokenItem]:
        """Its tokens. An end without a finish means that it was lost: whoever reads goes on by other means."""

    async def aclose(self) -> None:
        """Ends it, if it has not ended."""


class Elsewhere(Protocol):
    async def passed(
        self, prepared: Prepared, work: Work, route: RouteRequest, dispatcher: Dispatcher
    ) -> Passed | None:
        """The request, if it is better off elsewhere and has begun there; None: it is this cluster's."""
