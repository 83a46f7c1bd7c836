"""Empty databases of both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def empty_database(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """The URL of one, by the fixture's parameter: a file in ``folder``, or of the tests' server."""
    if request.param == "sqlite":
        yield f"sqlite:///{folder / 'shared' / 'state.sqlite3'}"
        return
    running = request.getfixturevalue("postgres_server")
    url = running.create()
    yield url
    running.drop(url)
