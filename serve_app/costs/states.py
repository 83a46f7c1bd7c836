"""How many slots of states a model has whose layers keep some, and how much of the cache they take."""

from __future__ import annotations

from dataclasses import dataclass

# Of texts that others may begin like, beside two for each that runs.
KEPT_STATES = 64


class NoRoom(ValueError):
    """Not even one text could run; the text says what is missing."""


@dataclass(slots=True, frozen=True)
class Slots:
    """``count`` slots, with which ``texts`` may run at once."""

    count: int
    texts: int


def share_out(budget: int, size: int, texts: int, *, alone: bool = False) -> Slots:
    """Slots of ``size`` bytes for a cache of ``budget`` bytes (0: as large as need be) and up to ``texts`` texts at
    once: two for each, and others for those that begin alike. They and one that is nobody's take half of the cache at
    most, or all of it where there is nothing else in it (``alone``); fewer texts may run then. Raises :class:`NoRoom`.
    """
    wanted = 2 * texts + KEPT_STATES
    if not budget:
        return Slots(wanted, texts)
    fits = (budget if alone else budget // 2) // size - 1
    if fits < 3:
        raise NoRoom(
            f"a cache of {budget / 2**20:.0f} MiB does not hold the states of one text that runs and one that is kept: "
            f"that are four of {size / 2**20:.1f} MiB, in half of it; raise kv_cache_bytes"
        )
    count = min(fits, wanted)
    return Slots(count, min(texts, (count - 1) // 2))


def slot_bytes(slots: int, size: int) -> int:
    """Of ``slots`` and the one that is nobody's."""
    return (slots + 1) * size if slots else 0
