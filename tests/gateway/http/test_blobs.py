"""Ranges of files that are asked for."""

from __future__ import annotations

import pytest

from serve_app.api.errors import RangeWrong
from serve_app.gateway.http.blobs import span


def test_ranges():
    assert [span(header, 10) for header in ("", "bytes=0-", "bytes=2-4", "bytes=-3", "bytes=5-99", "bytes=-99")] == [
        None, (0, 10), (2, 5), (7, 10), (5, 10), (0, 10)
    ]  # fmt: skip
    assert [span(header, 10) for header in ("bytes=4-2", "bytes=-", "lines=1-2", "bytes=0-1,3-4", "bytes=a-")] == [
        None
    ] * 5
    for header in ("bytes=10-", "bytes=-0", "bytes=99-100"):
        with pytest.raises(RangeWrong):
            span(header, 10)
