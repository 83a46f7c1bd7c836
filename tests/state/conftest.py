"""Every case of the store runs on both databases: see `database` in `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.state.store.sql import SqlStore
from tests.databases import empty_database


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database: a file, and a server."""
    yield from empty_database(request, tmp_path)


@pytest.fixture
def open_store(database: str, tmp_path: Path) -> Iterator[Callable[..., SqlStore]]:
    """``open_store(home="a")``: the store as a program with that state directory opens it."""
    opened: list[SqlStore] = []

    def make(home: str = "home") -> SqlStore:
        opened.append(SqlStore(tmp_path / home, database))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., SqlStore]) -> SqlStore:
    found = open_store()
    found.open()
    return found
