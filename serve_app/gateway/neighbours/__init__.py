"""Other clusters that serve the same models: who may pass requests here, and where this gateway passes its own.

``join`` plugs a gateway in whose settings list neighbours: the backend of engine workers asks
:attr:`EngineBackend.elsewhere` before a request enters its queue. What other clusters pass here comes by routes of its
own (:mod:`serve_app.gateway.http.routes.operating.neighbours`), of :mod:`.receiving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway
    from serve_app.gateway.neighbours.passing import Neighbours


def join(gateway: Gateway, **more: Any) -> Neighbours | None:
    """Has the gateway pass requests to the neighbours of its settings, if it has any."""
    if not gateway.settings.neighbours:
        return None
    # It brings an HTTP client, which a gateway without neighbours does not need.
    from serve_app.gateway.neighbours.passing import Neighbours

    found = Neighbours(gateway, gateway.settings.neighbours, **more)
    gateway.engine.elsewhere = found
    found.start()
    return found
