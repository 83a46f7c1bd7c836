"""A store and files of a test's own, as `tests/state` has them."""

from __future__ import annotations

from tests.state.conftest import open_store, store

__all__ = ["open_store", "store"]
