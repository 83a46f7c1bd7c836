"""What can be wrong with the state."""

from __future__ import annotations


class StateError(Exception):
    """The state cannot be used, or not be changed as asked; the text says what to do."""


class AccountsError(StateError):
    """An account or a key cannot be read or changed; the text says what to do."""


class Away(Exception):
    """The store cannot be reached at the moment."""


class Damaged(Away):
    """The store is there and must not be used; the text says what to do."""
