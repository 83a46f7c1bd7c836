"""Input in pieces of any size is cut into the same requests."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.errors import InvalidInput
from serve_app.batch.split import ArrayItems, lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=6)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def cut(data: bytes, size: int = 7, longest: int = 1000):
    items = ArrayItems("requests", longest)
    found = [item for piece in pieces(data, size) for item in items.feed(piece)]
    return found, items.finish()


@settings(max_examples=8)
@given(ITEMS, st.dictionaries(st.text(max_size=8).filter(lambda key: key != "requests"), VALUES, max_size=2),
       st.booleans(), st.integers(1, 40), st.booleans())  # fmt: skip
def test_items_of_an_array(listed, more, first, size, indented):
    whole = {"requests": listed, **more} if first else {**more, "requests": listed}
    data = orjson.dumps(whole, option=orjson.OPT_INDENT_2 if indented else None)
    found, outside = cut(data, size)
    assert [orjson.loads(item) for item in found] == listed
    assert outside == {**more, "requests": []}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b'{"requests":3}', b'{"requests":[{},]}', b'{"requests":[{} {}]}', b'{"requests":[{},,{}]}',
        b'{"requests":[{}', b'{"requests":[{}]', b'{"requests":[1]}', b'{"requests":[{}]}x', b'{"requests":[{}],"a"}',
        b'{"other":{"requests":[{}]}}', b'{"requests":["' + b"x" * 2000 + b'"]}', b'{"requests":[{}],"a":[',
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 5, 5000])
def test_what_is_no_such_object_is_refused(data, size):
    with pytest.raises(InvalidInput):
        cut(data, size)


@given(st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b" ")), max_size=8), st.integers(1, 20))
def test_lines_have_their_numbers(listed, size):
    expected = [(i, line) for i, line in enumerate(listed) if line.strip()]
    assert list(lines(pieces(b"\n".join(listed), size), 100)) == expected


def test_a_line_that_is_too_long_is_named_and_nothing_after_it_is_lost():
    data = b"one\n" + b"x" * 50 + b"\nthree\n" + b"y" * 50
    for size in (1, 3, 20, 200):
        assert list(lines(pieces(data, size), 10)) == [(0, b"one"), (1, None), (2, b"three"), (3, None)]
