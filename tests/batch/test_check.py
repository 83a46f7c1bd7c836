"""A request of a batch is taken exactly when its dialect's parser takes it, whatever was checked before."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import orjson
import pytest

from serve_app.api.errors import ApiError
from serve_app.batch.check import FORMS, Checker, NoModel
from serve_app.state.callers.accounts import Caller
from tests.batch.world import CHAT, EMBED, RERANK, known

TURN = [{"role": "user", "content": "What?"}]
RUN = f"/client/v4/accounts/local/ai/run/{CHAT}"
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": CHAT, "messages": TURN},
    "/v1/completions": {"model": CHAT, "prompt": "import"},
    "/v1/responses": {"model": CHAT, "input": "What?"},
    "/v1/embeddings": {"model": EMBED, "input": "text"},
    "/v1/rerank": {"model": RERANK, "query": "q", "documents": ["a", "b"]},
    "/v2/rerank": {"model": RERANK, "query": "q", "documents": ["a", "b"]},
    "/v1/score": {"model": RERANK, "text_1": "q", "text_2": ["a", "b"]},
    "/v1/messages": {"model": CHAT, "messages": TURN, "max_tokens": 5, "system": "Be brief."},
    RUN: {"prompt": "What?"},
    f"/client/v4/accounts/local/ai/run/{EMBED}": {"text": ["a"]},
    f"/client/v4/accounts/local/ai/run/{RERANK}": {"query": "q", "contexts": [{"text": "a"}]},
}
# What may stand in any field, right or wrong.
ODD = [None, "", "x", 0, 7, -1, 2.5, True, [], [""], ["x"], ["x", "y", "z"], [[None]], [[1, 2]], {}, {"a": 1}, TURN,
       [{"role": "assistant", "content": "x"}], [{"role": "robot", "content": "x"}], [{"role": "user"}], "text",
       [{"role": "user", "content": ""}], [*TURN, {"role": "system", "content": "y"}], ["x"] * 200, 2**70]  # fmt: skip
FIELDS = ("messages", "prompt", "input", "query", "documents", "text", "system", "max_tokens", "n", "seed", "stream",
          "temperature", "tools", "model", "requests", "options", "instructions", "metadata", "lora")  # fmt: skip


def verdict(checker: Checker, url: str, body: dict[str, Any]) -> str:
    try:
        return checker.check(url, orjson.dumps(body)).model.id
    except NoModel as missing:
        return str(missing.error)
    except ApiError as error:
        return error.message


def test_every_url_has_a_good_body():
    assert FORMS.keys() <= GOOD.keys()


@pytest.mark.parametrize("url", GOOD)
def test_what_was_checked_before_changes_nothing(tmp_path, url):
    """One checker sees everything, twice; for each body there is one that has seen nothing."""
    about, caller = known(tmp_path), Caller("local")
    used = Checker(about, caller)
    assert verdict(used, url, GOOD[url]) in (CHAT, EMBED, RERANK)
    differ = 0
    for field, value in itertools.chain(itertools.product(FIELDS, [v for v in ODD if v != 2**70]), [("seed", 2**63)]):
        body = {**copy.deepcopy(GOOD[url]), field: value}
        fresh = verdict(Checker(about, caller), url, body)
        assert verdict(used, url, body) == verdict(used, url, body) == fresh, (field, value)
        differ += fresh not in (CHAT, EMBED, RERANK)
    assert 10 < differ < 300


def test_what_is_wrong_with_many_is_read_once(tmp_path, monkeypatch):
    checker, looked = Checker(known(tmp_path), Caller("local")), []
    monkeypatch.setattr(Checker, "_parsed", lambda *a, whole=Checker._parsed: looked.append(a) or whole(*a))
    url, body = "/v1/chat/completions", GOOD["/v1/chat/completions"]
    for text in ("one", "two"):
        told = verdict(checker, url, {**body, "messages": [{"role": "user", "content": text}], "temperature": 9})
        assert "temperature" in told and len(looked) == 1
    assert verdict(checker, url, body) == CHAT and len(looked) == 2
    # A prompt that is wrong says nothing of others.
    for text in ("x", 7, "y"):
        verdict(checker, url, {**body, "messages": [{"role": "user", "content": text}], "max_tokens": 3})
    assert verdict(checker, url, {**body, "max_tokens": 3}) == CHAT


def test_streams_estimates_and_strangers_are_refused(tmp_path):
    checker = Checker(known(tmp_path), Caller("local"))
    url, body = "/v1/chat/completions", GOOD["/v1/chat/completions"]
    assert "answered as a whole" in verdict(checker, url, {**body, "stream": True})
    assert "options.estimate" in verdict(checker, url, {**body, "options": {"estimate": True}})
    assert "background" in verdict(checker, "/v1/responses", {**GOOD["/v1/responses"], "background": True})
    with pytest.raises(NoModel):
        checker.check(url, orjson.dumps({**body, "model": "@cf/no/such"}))
    with pytest.raises(NoModel):  # another task's
        checker.check(url, orjson.dumps({**body, "model": EMBED}))
    for raw in (b"", b"[]", b"{", b'{"a":"\\ud800"}'):
        with pytest.raises(ApiError):
            checker.check(url, raw)
    with pytest.raises(ApiError, match="larger than"):
        checker.check(url, orjson.dumps({**body, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}))


def test_prompts_are_told_apart_by_how_they_begin(tmp_path):
    checker = Checker(known(tmp_path), Caller("local"))

    def begins(url: str, body: dict[str, Any]) -> bytes:
        return checker.check(url, orjson.dumps({**GOOD[url], **body})).begins

    for url, field in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), (RUN, "messages")):
        system = {"role": "system", "content": "s" * 300}
        base: dict[str, Any] = {"prompt": None} if url == RUN else {}
        one, two = ({**base, field: [system, {"role": "user", "content": c * 900}]} for c in "ab")
        assert begins(url, one)[:12] == begins(url, two)[:12] and begins(url, one) != begins(url, two)
    assert not any(begins("/v1/embeddings", {"input": "x" * 1000}))
