"""A model that has scaled to zero: which requests wait for its first worker, and which are told when to come back."""

from __future__ import annotations

from serve_app.routing.types import Refusal, RouteRequest

# Retry-After where nothing is known yet of how long a model takes to load.
FIRST_GUESS_S = 10.0


class ColdStart:
    """Call ``begun`` when a request has been sent to a model without workers, and ``over`` when a worker reports.

    A model that always has workers refuses nothing here.
    """

    def __init__(self, scales_to_zero: bool) -> None:
        self._scales_to_zero = scales_to_zero
        self._since: float | None = None
        self._takes_s = FIRST_GUESS_S

    def begun(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def over(self, now: float) -> None:
        if self._since is not None:
            if self._scales_to_zero:
                self._takes_s = now - self._since
            self._since = None

    def left(self, now: float) -> float:
        """Seconds until the first worker is up, by the length of the last start; at least 1."""
        return max(self._takes_s - (now - self._since if self._since is not None else 0.0), 1.0)

    def consider(self, request: RouteRequest, now: float) -> Refusal | None:
        """At arrival, while no worker is up: None if the request can wait for the first one.

        The first refusal asks for a worker to be started, so that the client finds it when it comes back.
        """
        if not self._scales_to_zero:
            return None
        left = self.left(now)
        if request.reject_if_busy:
            reason = "no worker is up, and the request said not to wait"
        elif request.deadline is not None and now + left > request.deadline:
            reason = "no worker is up, and its first token would come too late"
        else:
            return None
        first = self._since is None
        self.begun(now)
        return Refusal(left, reason, start_worker=first)
