"""The promise that speculation never hurts, kept by book-keeping rather than by foresight."""

from __future__ import annotations

from serve_app.engine.speculation.policy import Policy


class LossBudget:
    """Seconds gained and lost by steps that look for drafts, against plain ones.

    A step that looks earns what its tokens would have cost in plain steps, and spends what it took: the forward pass,
    drafting, and book-keeping. Losses are allowed up to two plain steps and a quarter of a percent of the time spent
    decoding; when they are used up, nobody looks until they are earned again. However wrong the estimates are, that is
    all speculation can cost.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.balance = 0.0
        self.gained = 0.0
        self.used_up = False

    def ran_plain(self, seconds: float, steps: int = 1) -> None:
        """Steps that did not look for drafts."""
        if self.balance < 0:
            self.balance = min(0.0, self.balance + self._policy.share * seconds)
        if self.balance > -self._policy.debt / 2 * seconds / steps:
            self.used_up = False

    def looked(self, worth: float, spent: float, plain: float) -> None:
        """A step yielded tokens ``worth`` so many seconds of plain steps and took ``spent``; ``plain`` is the time of
        one plain step.
        """
        # One hiccup of the machine costs drafts a rest, not their future.
        change = max(worth - spent, -self._policy.debt * plain)
        self.gained += change
        self.balance = min(self.balance + change + self._policy.share * spent, self._policy.credit * plain)
        self.used_up = self.balance < -self._policy.debt * plain
