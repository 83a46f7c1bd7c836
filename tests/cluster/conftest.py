"""Where clusters of ``ray start`` keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.run_directory import end_processes


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets; what names it is ended."""
    with tempfile.TemporaryDirectory(prefix="head-", dir="/tmp", ignore_cleanup_errors=True) as made:
        try:
            yield Path(made)
        finally:
            end_processes(Path(made))
