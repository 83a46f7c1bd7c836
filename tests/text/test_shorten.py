"""Texts that are too long: which of their tokens stay."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.shorten import parse_shorten
from serve_app.api.types import Shorten
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.text.shorten import kept_tokens
from serve_app.text.tokenizer import Tokenizer

# [CLS] a a a [SEP] b b b b [SEP]
PAIR = np.array([-1, 0, 0, 0, -1, 1, 1, 1, 1, -1])


@pytest.mark.parametrize(
    ("shorten", "kept"),
    [
        (Shorten(), range(10)),
        (Shorten(10), range(10)),
        (Shorten(8), [0, 1, 2, 3, 4, 5, 6, 9]),
        (Shorten(8, side="start"), [0, 1, 2, 3, 4, 7, 8, 9]),
        (Shorten(5), [0, 1, 2, 4, 9]),
        (Shorten(5, side="start"), [0, 2, 3, 4, 9]),
        (Shorten(second=1), [0, 1, 2, 3, 4, 5, 9]),
        (Shorten(9, second=3), [0, 1, 2, 3, 4, 5, 6, 7, 9]),
    ],
)
def test_the_second_text_is_cut_first_and_marks_stay(shorten: Shorten, kept: list[int]) -> None:
    assert kept_tokens(PAIR, shorten).tolist() == list(kept)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_text_of_which_nothing_would_be_left_is_refused(tokens: int) -> None:
    with pytest.raises(InvalidInput, match="No text would be left"):
        kept_tokens(PAIR, Shorten(tokens))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(PROJECT_ROOT / "checkpoints" / "pico-reranker")


def test_a_cut_text_is_one_of_fewer_words(tokenizer: Tokenizer) -> None:
    """Marks around it, types with it, and what spells a mark stays text."""
    words = ["close", "the", "file", "[SEP]", "and", "read", "it", "again"]
    [whole] = tokenizer.encode_batch([" ".join(words)])
    for side in ("end", "start"):
        [cut] = tokenizer.encode_batch([" ".join(words)], shorten=Shorten(6, side=side))  # type: ignore[arg-type]
        inner = whole[1:5] if side == "end" else whole[-5:-1]
        assert cut.tolist() == [whole[0], *inner, whole[-1]]
    [(ids, types)] = tokenizer.encode_pairs([("one", "two three four")], shorten=Shorten(6))
    [(expected, kinds)] = tokenizer.encode_pairs([("one", "two three")])
    assert len(expected) == len(ids) == 6 or ids.tolist() == expected[: len(ids) - 1].tolist() + [expected[-1]]
    assert len(types) == len(ids) and set(types) == set(kinds)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"truncate": True}, Shorten()),
        ({"truncate": "NONE"}, None),
        ({"truncate": "START"}, Shorten(side="start")),
        ({"truncate": "end"}, Shorten()),
        ({"truncate_inputs": True}, Shorten()),
        ({"truncate_inputs": False, "truncate": None}, None),
        ({"truncate_prompt_tokens": -1}, Shorten()),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, Shorten(7, side="start")),
        ({"truncate": True, "truncation_direction": "Left"}, Shorten(side="start")),
    ],
)
def test_what_clients_call_it(body: dict, expected: Shorten | None) -> None:
    assert parse_shorten(body) == expected


def test_a_default_is_what_applies_where_nothing_is_said() -> None:
    assert parse_shorten({}, Shorten(second=4)) == Shorten(second=4)
    assert parse_shorten({"truncate": False}, Shorten(second=4)) is None
    assert parse_shorten({"truncate_prompt_tokens": 9}, Shorten(second=4)) == Shorten(9, 4)
