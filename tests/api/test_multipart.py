"""Forms of strangers: what splits them into millions of parts, or names no boundary, is refused at once."""

from __future__ import annotations

import tracemalloc

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.files import read_file
from serve_app.api.multipart import MAX_PARTS, BodyPart, read_multipart, write_multipart


def test_as_many_parts_as_there_may_be_and_no_more():
    parts = [BodyPart(f"p{number}", b"x", "text/plain") for number in range(MAX_PARTS)]
    assert read_multipart(*write_multipart(parts)) == parts
    with pytest.raises(InvalidInput, match=f"more than {MAX_PARTS} parts"):
        read_multipart(*write_multipart([*parts, *parts]))


@pytest.mark.parametrize("boundary", ["", '=""', "*=utf-8''%E2%82%AC", "=" + "x" * 71])
def test_a_boundary_that_cannot_be_one_is_refused(boundary):
    with pytest.raises(InvalidInput, match="boundary"):
        read_multipart(b"--x--", f"multipart/form-data; boundary{boundary}")


def peak(function) -> int:
    """Bytes that ``function`` has at once, at most."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_a_few_times_the_body_whatever_is_in_it():
    body = b"\r\n--aXY" * 20_000 + b"--"
    assert peak(lambda: read_multipart(body, "multipart/form-data; boundary=a")) < 3 * len(body)
    coded = "AAAA " * 20_000 + "*"
    assert peak(lambda: read_file(b"", {"image": coded}, "image")) < 4 * len(coded)
