"""A model of which no worker reports: who waits for one, who is told when to come back, and who is sent without a
choice.
"""

from __future__ import annotations

from serve_app.routing.types import Refusal, RouteRequest

# Retry-After where nothing is known yet of how long a worker takes to come up.
FIRST_GUESS_S = 10.0
# A worker that was told where to report does so at once, and every two seconds. One that has not by now cannot reach
# this gateway; a gateway that has heard of no worker by now is not just too young.
SILENCE_S = 3.0


class Absence:
    """``lost`` when the last worker has gone, ``begun`` when a request finds none, ``over`` when one reports.

    ``asked``: workers are asked for reports, and ``told`` says whether one has heard of it. Then requests wait for its
    report; if none comes, and where nobody asks, the caller's own load balancing chooses.
    """

    def __init__(self, scales_to_zero: bool, slots: int) -> None:
        self.asked = False
        self._scales_to_zero = scales_to_zero
        self._slots = slots
        self._since: float | None = None
        self._told_at: float | None = None
        self._known = False
        self._takes_s = FIRST_GUESS_S

    def lost(self, now: float) -> None:
        """There is no worker any more. A model that scales to zero may do without for hours."""
        self._told_at = None
        if not self._scales_to_zero:
            self.begun(now)

    def begun(self, now: float) -> None:
        """A request has to do without a worker."""
        if self._since is None:
            self._since = now

    def told(self, listens: bool, now: float) -> None:
        """Whether a worker has heard where to report."""
        self._told_at = (now if self._told_at is None else self._told_at) if listens else None

    def over(self, now: float) -> None:
        """A worker reports."""
        if self._since is not None and (self._known or self._scales_to_zero):
            self._takes_s = now - self._since
        self._known = True
        self._since = self._told_at = None

    def left(self, now: float) -> float:
        """Seconds until a worker is up, by how long it took the last time; at least 1."""
        return max(self._takes_s - (now - self._since if self._since is not None else 0.0), 1.0)

    def consider(self, request: RouteRequest, now: float) -> Refusal | None:
        """None if the request can wait for a worker.

        The first refusal of a model that scales to zero asks for a worker to be started, so that the client finds it
        when it comes back.
        """
        if not self._scales_to_zero and not self.waits(now):
            return None
        first = self._since is None
        if not self._scales_to_zero and not self._known:
            self.begun(now)
            if self._since is None or now - self._since <= SILENCE_S:
                return None
        left = self.left(now)
        if request.reject_if_busy:
            reason = "no worker is up, and the request said not to wait"
        elif request.deadline is not None and now + left > request.deadline:
            reason = "no worker is up, and its first token would come too late"
        else:
            return None
        self.begun(now)
        return Refusal(left, reason, start_worker=first and self._scales_to_zero)

    def waits(self, now: float) -> bool:
        """Whether a worker that comes up will report, so that requests wait for that."""
        return self.asked and not (self._told_at is not None and now - self._told_at > SILENCE_S)

    def sends(self, streams: int, sent: int, now: float) -> bool:
        """Whether a request of so many streams is sent without a choice, while ``sent`` streams have been: up to
        ``slots`` where no report will come, and otherwise the one that starts a model at zero.
        """
        if self.waits(now):
            return self._scales_to_zero and not sent
        return not sent or sent + streams <= self._slots
