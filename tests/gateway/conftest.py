"""Gateways on one store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.http.test_accounts import Served


@pytest.fixture
async def served(tmp_path: Path, database: str) -> AsyncIterator[Served]:
    made = Served(tmp_path, database)
    await made.start()
    yield made
    await made.aclose()
