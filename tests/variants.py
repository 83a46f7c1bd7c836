"""Variants of a test of which some always run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *always: Any, names: int = 1) -> list[Any]:
    """``values`` as parameters: all but ``always`` are slow, since those and other tests show what they would. Each is
    the value of one name, or a tuple with those of several."""
    found = list(values)
    assert all(value in found for value in always), f"{always} are not all among {found}"
    return [
        value if value in always else pytest.param(*(value if names > 1 else [value]), marks=pytest.mark.slow)
        for value in found
    ]
