"""Ids with a prefix, and how many of a list are asked for."""

from __future__ import annotations

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.pages import hex_key, page_ends, page_limit

KEY = "0123456789abcdef" * 2


def test_an_id_is_its_prefix_and_32_hex_digits():
    assert hex_key(f"batch_{KEY}", "batch_") == hex_key(KEY, "") == KEY
    for wrong in (KEY, f"file-{KEY}", f"batch_{KEY}0", f"batch_{KEY.upper()}", "batch_", f"batch_{KEY}\n"):
        assert hex_key(wrong, "batch_") is None


def test_limits_are_small_whole_numbers():
    assert [page_limit(query, 20, 100) for query in ({}, {"limit": " 7 "}, {"limit": "0100"})] == [20, 7, 100]
    for wrong in ("0", "101", "000100000", "1" * 5000, "-1", "1.0", "\u0663"):
        with pytest.raises(InvalidInput, match="between 1 and 100"):
            page_limit({"limit": wrong}, 20, 100)


def test_ends_of_a_page():
    assert page_ends([{"id": "a"}, {"id": "b"}]) == {"first_id": "a", "last_id": "b"}
    assert page_ends([]) == {"first_id": None, "last_id": None}
