"""Stop strings: text ends before the first one that is completed, however the text is cut into deltas."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Finds stop strings across deltas, holding back only what may still become one.

    The string completed first wins; of those completed at the same character, the longest. That makes the
    outcome independent of how the text arrives.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Iterable[str] = ()):
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._stops)

    def feed(self, text: str) -> str:
        """The part of all text so far that can be shown now; after a match (``matched`` is set) always
        nothing."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._held_back()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _held_back(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
