"""How often to look for drafts where looking has brought nothing lately."""

from __future__ import annotations

from serve_app.engine.speculation.step_costs import size_class


class Rhythm:
    """Each step looks at first; the more looks in a row were fruitless, the fewer steps do, one in ``MOST`` at last.

    Kept by batch size, since what pays for one request may not pay for many.
    """

    # So many fruitless looks make the pauses twice as long, twice as many four times, and so on.
    PATIENCE, MOST = 16, 16

    def __init__(self) -> None:
        self._fruitless: dict[int, int] = {}

    def pause(self, batch: int, now: int) -> int:
        """Steps from number ``now`` on that should not look; 0: this one should."""
        patience = self._fruitless.get(size_class(batch), 0) // self.PATIENCE
        return -now % min(self.MOST, 1 << patience.bit_length())

    def looked(self, batch: int, fruitful: bool) -> None:
        """A step looked; ``fruitful``: it gained time by that."""
        key = size_class(batch)
        self._fruitless[key] = 0 if fruitful else self._fruitless.get(key, 0) + 1

    def request_ended(self) -> None:
        """Who comes next may be of another kind."""
        self._fruitless = {key: count // 2 for key, count in self._fruitless.items()}
