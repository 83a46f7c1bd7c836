"""The promise that speculation never hurts, kept by book-keeping rather than by foresight."""

from __future__ import annotations


class Ledger:
    """Seconds gained and lost by steps that look for drafts against those that do not.

    A step that looks earns what its tokens would have cost in plain steps, and spends what it took: the forward pass,
    asking proposers, and the book-keeping itself. Losses are allowed up to two plain steps and a quarter of a percent
    of the time spent decoding; when they are used up, nobody looks until they are earned again. However wrong the
    estimates are, that is all speculation can cost.

    There is one for look-ups and one for each proposer that takes time, to which the steps are booked that asked it:
    one that does not pay does not keep others from it.
    """

    SHARE = 0.0025
    # In plain steps: what may be lost in advance, and what past gains may be risked again.
    DEBT, CREDIT = 2.0, 16.0

    def __init__(self) -> None:
        self.balance = 0.0
        self.gained = 0.0
        self.suspended = False

    def stepped_aside(self, seconds: float, steps: int = 1) -> None:
        """Plain steps, for which nobody looked."""
        if self.balance < 0:
            self.balance = min(0.0, self.balance + self.SHARE * seconds)
        if self.balance > -self.DEBT / 2 * seconds / steps:
            self.suspended = False

    def looked(self, worth: float, spent: float, plain: float) -> None:
        """A step that yielded tokens ``worth`` so many seconds of plain steps and took ``spent``; ``plain`` is the
        time of one plain step.
        """
        # One hiccup of the machine costs drafts a rest, not their future.
        change = max(worth - spent, -self.DEBT * plain)
        self.gained += change
        self.balance = min(self.CREDIT * plain, self.balance + change + self.SHARE * spent)
        self.suspended = self.balance < -self.DEBT * plain
