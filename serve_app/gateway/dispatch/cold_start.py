"""A model that has scaled to zero: who can wait for its first worker, and who is told when to come back."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.routing.types import Refusal, RouteRequest

# Retry-After where nothing is known yet of how long a model takes to load.
FIRST_GUESS_S = 10.0


class ColdStart:
    """``begun`` when a request has been sent to a model without workers, ``over`` when one reports. ``wake`` starts a
    worker without a request. Does nothing for models that always have workers.
    """

    def __init__(self, scales_to_zero: bool) -> None:
        self._scales_to_zero = scales_to_zero
        self._since: float | None = None
        self._takes_s = FIRST_GUESS_S
        self.wake: Callable[[], None] = lambda: None

    def begun(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def over(self, now: float) -> None:
        if self._since is not None:
            if self._scales_to_zero:
                self._takes_s = now - self._since
            self._since = None

    def left(self, now: float) -> float:
        """Seconds until the first worker is up, as far as the last start tells; at least 1."""
        return max(self._takes_s - (now - self._since if self._since is not None else 0.0), 1.0)

    def consider(self, request: RouteRequest, now: float) -> Refusal | None:
        """Whether a request can't wait for the first worker, which is started in any case."""
        if not self._scales_to_zero:
            return None
        left = self.left(now)
        if request.reject_if_busy:
            reason = "no worker is up, and the request said not to wait"
        elif request.deadline is not None and now + left > request.deadline:
            reason = "no worker is up, and its first token would come too late"
        else:
            return None
        # Who comes back after that time shall find a worker.
        if self._since is None:
            self._since = now
            self.wake()
        return Refusal(left, reason)
