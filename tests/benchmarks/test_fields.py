"""docs/fields.md is what the code says, and the code says something."""

from __future__ import annotations

import pytest

from benchmarks.fields import DIALECTS, PAGE, candidates, page, verdicts
from serve_app.api.fields.sampling import _UNSUPPORTED


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m benchmarks fields --write`"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_field_has_one_verdict(dialect):
    found = verdicts(dialect)
    names = [name for kind in found.values() for name in kind]
    assert sorted(names) == candidates(dialect) and set(dialect.good) - {"model"} <= set(found["taken"])
    for test in dialect.tests:
        assert (PAGE.parents[1] / test).is_file()


def test_verdicts_are_those_of_the_readers():
    chat = next(dialect for dialect in DIALECTS if dialect.path == "/v1/chat/completions")
    found = verdicts(chat)
    assert {"temperature", "stop_token_ids", "continue_final_message"} <= set(found["taken"])
    assert set(_UNSUPPORTED) & set(candidates(chat)) - {"prompt_logprobs"} <= set(found["refused"]) | {"image"}
    assert "user" in found["ignored"]
