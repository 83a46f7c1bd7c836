"""Steps are as large as memory allows, until gaps between tokens get too long."""

from __future__ import annotations

from serve_app.costs.pace import Pace


def test_steps_are_halved_while_gaps_are_long() -> None:
    pace = Pace(0.05)
    assert pace.tokens(8192) == 8192
    for _ in range(200):
        pace.took(0.045, 1)
    assert (pace.tokens(8192), pace.tokens(8192, least=5000), pace.tokens(100, least=256)) == (4096, 5000, 100)
    # Nobody waits for a token any more.
    pace.took(0.2, 0)
    assert pace.tokens(8192) == 8192
    # Accepted drafts are tokens as well.
    for _ in range(200):
        pace.took(0.1, 4)
    assert pace.tokens(8192) == 8192


def test_one_long_step_is_none_too_many() -> None:
    pace = Pace(0.05)
    for _ in range(100):
        pace.took(0.02, 1)
    pace.took(0.25, 1)
    assert pace.tokens(8192) == 8192
    for _ in range(12):
        pace.took(0.25, 1)
    assert pace.tokens(8192) == 4096


def test_where_steps_overlap_a_gap_is_from_token_to_token() -> None:
    pace = Pace(0.05)
    for _ in range(200):  # a prompt's step, and then one of the texts, which were under way all the while
        pace.took(0.04, 0, waits=True)
        pace.took(0.002, 1)
    assert pace.tokens(8192) == 4096
    pace.took(0.04, 0, waits=True)
    assert pace.tokens(8192) == 4096
    pace = Pace(0.05)
    for _ in range(200):  # texts in two steps under way: each waits for the other's as well
        pace.took(0.025, 1, least=0.05)
    assert pace.tokens(8192) == 4096


def test_without_a_target_every_step_may_be_full() -> None:
    pace = Pace()
    for _ in range(200):
        pace.took(10.0, 1)
    assert pace.tokens(8192) == 8192
