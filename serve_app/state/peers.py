"""The other gateways of the cluster: what is not here is asked of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0

# (method, wire) -> what every gateway's :meth:`serve_app.gateway.core.Gateway.for_peer` gives, this one's included.
AskPeers = Callable[[str, dict[str, Any]], Awaitable[list[Any]]]


class Peers:
    """``ask`` None: this gateway is alone."""

    def __init__(self, ask: AskPeers | None = None) -> None:
        self._ask = ask

    async def have(self, method: str, account: str, name: str) -> list[Any]:
        """The answers of those that have what an account calls ``name``. One that does not answer has nothing."""
        if self._ask is None:
            return []
        try:
            told = await asyncio.wait_for(self._ask(method, {"account": account, "id": name}), TIMEOUT_S)
        except Exception as error:  # a gateway that is being replaced must not fail the others' clients
            log.warning("other gateways can't be asked for a %s (%s)", method, type(error).__name__)
            return []
        return [answer for answer in told if answer is not None]
