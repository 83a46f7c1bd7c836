"""How requests ask to be treated: the same nouns from every dialect and from headers."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.api.anthropic import read as anthropic
from serve_app.api.collect import begun_within
from serve_app.api.errors import InvalidInput, Timeout
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import read as openai
from serve_app.api.responses import read as responses
from serve_app.api.types import TextDelta
from serve_app.api.workers_ai import read as workers_ai
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_generation.read import parse_generate
from tests.api.clients import MODEL

MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {
    "options": {"rejectIfBusy": True, "deadlineMs": 1500},
    "prompt_cache_key": "chat-7",
    "service_tier": "flex",
    "metadata": {"a": "b", "count": 3, "nothing": None},
}


def parsed():
    body = {"model": MODEL, "messages": MESSAGES, **ASKED}
    yield openai.parse_chat(body)
    yield from openai.parse_completions({"model": MODEL, "prompt": ["a", "b"], **ASKED})
    yield openai.parse_embeddings({"model": MODEL, "input": "x", **ASKED})
    yield responses.parse_responses({"model": MODEL, "input": "hi", **ASKED}).generate
    yield anthropic.parse_messages_request({**body, "max_tokens": 5})
    yield parse_generate({"prompt": "hi", **ASKED}, MODEL)
    yield parse_embed({"text": "hi", **ASKED}, MODEL)
    yield parse_rerank({"query": "hi", "contexts": [{"text": "a"}], **ASKED}, MODEL)


def test_every_dialect_and_task_reads_them():
    for request in parsed():
        assert (request.session, request.deadline_s, request.reject_if_busy) == ("chat-7", 1.5, True)
        assert (request.service_tier, request.metadata) == ("flex", {"a": "b", "count": "3"})


def test_the_generic_form_hands_its_options_on():
    body = {"model": MODEL, "input": {"prompt": "hi"}, "options": {"gateway": {"id": "g", "requestTimeoutMs": 250}}}
    name, inputs = workers_ai.parse_run_target(body)
    assert parse_generate(inputs, name).deadline_s == 0.25


def test_headers_are_hints():
    plain = openai.parse_chat({"model": MODEL, "messages": MESSAGES, "prompt_cache_key": "body"})
    assert with_headers(plain, {}) is plain
    told = with_headers(plain, {"x-session-affinity": "header", "cf-aig-request-timeout": "2000"})
    assert (told.session, told.deadline_s) == ("header", 2.0)
    assert with_headers(plain, {"cf-aig-request-timeout": "soon"}).deadline_s is None
    assert with_headers(told, {"cf-aig-request-timeout": "9000"}).deadline_s == 2.0
    assert len(with_headers(plain, {"x-session-affinity": "x" * 9000}).session) == 512


def test_anthropic_user_is_a_session():
    body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, "metadata": {"user_id": "u1"}}
    assert anthropic.parse_messages_request(body).session == "u1"


@pytest.mark.parametrize(
    "asked",
    [
        {"options": "fast"},
        {"options": {"rejectIfBusy": "yes"}},
        {"options": {"deadlineMs": 0}},
        {"options": {"deadlineMs": 1e30}},
        {"prompt_cache_key": 5},
        {"prompt_cache_key": "x" * 513},
        {"service_tier": ["flex"]},
        {"metadata": "x"},
        {"metadata": {str(i): "x" for i in range(17)}},
        {"metadata": {"a": {"b": "c"}}},
    ],
)
def test_wrong_types_are_refused(asked):
    with pytest.raises(InvalidInput):
        openai.parse_chat({"model": MODEL, "messages": MESSAGES, **asked})


def test_a_deadline_ends_what_has_not_begun():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
            yield TextDelta(0, "late")
        finally:
            ended.append(True)

    async def prompt():
        yield TextDelta(0, "a")
        await asyncio.sleep(0)
        yield TextDelta(0, "b")

    async def both():
        with pytest.raises(Timeout):
            await anext(begun_within(slow(), 0.01))
        assert ended
        assert [e.text async for e in begun_within(prompt(), 60)] == ["a", "b"]

    asyncio.run(both())
