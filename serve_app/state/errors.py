"""What can be wrong with the state."""

from __future__ import annotations


class StateError(Exception):
    """The state cannot be used, or not be changed as asked; the text says what to do."""


class AccountsError(StateError):
    """An account or a key cannot be read or changed; the text says what to do."""


class Missing(AccountsError):
    """There is no such account, key or member."""


class Taken(AccountsError):
    """There is one of this name already."""


class Away(Exception):
    """The store cannot be reached at the moment."""


class Damaged(Away):
    """The store is there and must not be used; the text says what to do."""


def unreachable(away: Away) -> StateError:
    """The same for somebody who waits for it on a terminal."""
    if isinstance(away, Damaged):
        return StateError(f"{away}.")
    return StateError(f"The database cannot be reached: {away}. Start it, or correct the setting.")


class QueueFull(StateError):
    """The account has so many unfinished requests of batches that no more are taken."""
