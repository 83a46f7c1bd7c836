"""The promise that speculation never hurts, kept by book-keeping rather than by foresight."""

from __future__ import annotations


class Ledger:
    """Seconds gained and lost by drafted steps against plain ones.

    A drafted step earns what its tokens would have cost in plain steps, and spends what it took. Losses are allowed up
    to a few plain steps and one percent of the time spent decoding; when they are used up, there are no drafts until
    they are earned again. However wrong the estimates are, that is all speculation can cost.
    """

    SHARE = 0.01
    # In plain steps: what may be lost in advance, and what past gains may be risked again.
    DEBT, CREDIT = 8.0, 16.0

    def __init__(self) -> None:
        self.balance = 0.0
        self.gained = 0.0
        self.suspended = False

    def plain_step(self, seconds: float) -> None:
        """A step without drafts."""
        if self.balance < 0:
            self.balance = min(0.0, self.balance + self.SHARE * seconds)
        if self.balance > -self.DEBT / 2 * seconds:
            self.suspended = False

    def drafted_step(self, worth: float, spent: float, plain: float) -> None:
        """A step that yielded tokens ``worth`` so many seconds of plain steps and took ``spent``; ``plain`` is the
        time of one plain step.
        """
        # One hiccup of the machine is not held against drafts.
        change = max(worth - spent, -4 * plain)
        self.gained += change
        self.balance = min(self.CREDIT * plain, self.balance + change + self.SHARE * spent)
        self.suspended = self.balance < -self.DEBT * plain
