"""A decode worker's way to a draft worker."""

from __future__ import annotations

from typing import Any

import ray

NAMESPACE = "serve_app"


class DraftLink:
    """Calls a draft worker from the engine's thread. While it can't be reached, there are simply no drafts."""

    TIMEOUT_S = 1.0

    def __init__(self) -> None:
        self._actor: Any = None

    @property
    def connected(self) -> bool:
        return self._actor is not None

    def connect(self, name: str) -> None:
        self._actor = ray.get_actor(name, namespace=NAMESPACE)

    def __call__(self, queries: list[Any], count: int, over: list[str]) -> dict[str, list[int] | None]:
        """Raises ``RayError`` where the worker does not answer in time, and is not connected any more then."""
        actor = self._actor
        if actor is None:
            raise ray.exceptions.RayError("no draft worker is connected")
        try:
            asked = actor.propose.remote([(q.id, q.agreed, q.suffix) for q in queries], count, over)
            return ray.get(asked, timeout=self.TIMEOUT_S)
        except ray.exceptions.RayError:
            self._actor = None
            raise
