"""Which messages go where a conversation is too long: `truncation: "auto"` of the Responses dialect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.errors import ContextTooLong
from serve_app.api.responses.read import parse_responses
from serve_app.text.prompt import prompt_ids
from serve_app.text.truncate import without_oldest


@pytest.fixture
def pico(tokenizers):
    return tokenizers["pico"]


ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def talk(letters: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[letter], "place": place} for place, letter in enumerate(letters)]


def left(letters: str, most: int) -> str | None:
    """What is left of the conversation where ``most`` messages fit, by the places that stay."""
    found = without_oldest(talk(letters), lambda some: some if len(some) <= most else None)
    return None if found is None else "".join(f"{letters[m['place']]}{m['place']}" for m in found)


@pytest.mark.parametrize(
    ("letters", "most", "stays"),
    [
        ("suauau", 9, "s0u1a2u3a4u5"),
        ("suauau", 5, "s0u3a4u5"),
        ("suauau", 3, "s0u5"),
        ("suauau", 1, None),
        ("uuaua", 3, "u3a4"),
        ("auau", 3, "u3"),
        # What is answered now loses its oldest calls, each with its results.
        ("suauattat", 7, "s0u3a4t5t6a7t8"),
        ("suauattat", 4, "s0u3a7t8"),
        ("suauattat", 3, None),
        ("s", 0, None),
        ("sss", 3, "s0s1s2"),
    ],
)
def test_the_oldest_go_first(letters, most, stays):
    assert left(letters, most) == stays


@given(st.lists(st.sampled_from(["ua", "uata", "u", "s", "uuat"]), max_size=30), st.integers(0, 100))
def test_no_more_goes_than_has_to_and_calls_keep_their_results(exchanges, most):
    letters = "".join(exchanges)
    asked: list[int] = []

    def fits(some: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        asked.append(len(some))
        return some if len(some) <= most else None

    found = without_oldest(talk(letters), fits)
    assert len(asked) <= 3 + len(letters).bit_length()
    if found is None:
        assert min(asked) > most
        return
    places = [message["place"] for message in found]
    kept = "".join(letters[place] for place in places)
    assert places == sorted(places) and len(kept) <= most
    if len(letters) <= most:
        assert kept == letters
    # A result stands behind a call, and where there are messages of users one of them comes first.
    assert all(place - 1 in places for place in places if letters[place] == "t")
    assert "u" not in letters or kept.lstrip("s")[0] == "u"


def asked(words: int, turns: int, truncation: str = "auto", **more: Any) -> Any:
    turn = [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": "yes"}]
    body = {"model": "m", "instructions": "Be brief.", "input": [*(turn * turns), {"role": "user", "content": "Last?"}]}
    return parse_responses({**body, "truncation": truncation, **more}).generate


def test_the_prompt_is_that_of_the_conversation_that_is_left(pico):
    short, long = asked(20, 2), asked(20, 12)
    expected = prompt_ids(pico, short).tolist()
    window = len(expected) + 50
    assert prompt_ids(pico, asked(20, 12, max_output_tokens=50), context_window=window).tolist() == expected
    # A quarter of the window is the answer's where the client does not say how much.
    assert len(prompt_ids(pico, long, context_window=400)) <= 300
    # What fits stays whole.
    assert prompt_ids(pico, long, context_window=9999).tolist() == prompt_ids(pico, long).tolist()


def test_what_cannot_be_dropped_is_refused(pico):
    with pytest.raises(ContextTooLong):
        prompt_ids(pico, asked(20_000, 0, instructions="long " * 20_000), context_window=400)
    with pytest.raises(ContextTooLong):
        prompt_ids(pico, asked(2000, 12, "disabled"), context_window=400)
