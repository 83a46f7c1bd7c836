"""The conformance suite finds what is wrong, on answers that are: shapes, statuses, headers, ends of streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.run import ask, events_of, run
from benchmarks.conformance.shapes import NUMBER, any_of, filled, length, problem
from benchmarks.conformance.table import cases

MODELS = Models("chat", "embed", "rerank", "mine")
CHUNK = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}


@pytest.mark.parametrize(
    ("value", "shape", "told"),
    [
        ({"a": 1, "b": [1.5]}, {"a": int, "b": [NUMBER], "c?": str}, None),
        ({"a": "1"}, {"a": int}, "a is '1', no int"),
        ({"a": True}, {"a": int}, "a is True, no int"),
        ({}, {"a": {"b": int}}, "the body lacks a"),
        ({"a": {"b": [{"c": 1}, {}]}}, {"a": {"b": [{"c": int}]}}, "a.b[1] lacks c"),
        ({"c": 5}, {"c?": str}, "c is 5, no str"),
        ({"a": None}, {"a": any_of(str, None)}, None),
        ({"a": 3}, {"a": any_of(str, None)}, "a is 3"),
        ({"a": []}, {"a": filled(int)}, "a is empty"),
        ({"a": [1]}, {"a": length(2, int)}, "a has not 2 items"),
        ({"a": "x"}, {"a": "y"}, "a is 'x' instead of 'y'"),
        ([], {"a": int}, "the body is no object"),
    ],
)
def test_shapes(value: Any, shape: Any, told: str | None) -> None:
    assert problem(value, shape) == told


def _stream(*chunks: dict[str, Any], done: bool = True) -> str:
    return "".join(f"data: {json.dumps({**CHUNK, **chunk})}\n\n" for chunk in chunks) + "data: [DONE]\n\n" * done


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


ROLE, TEXT, END = _choice({"role": "assistant"}), _choice({"content": "x"}), _choice({}, "stop")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_stream(ROLE, TEXT, END), ""),
        (_stream(ROLE, TEXT, END, done=False), "does not end with [DONE]"),
        (_stream(TEXT, END), "no role"),
        (_stream(ROLE, END), "no content"),
        (_stream(ROLE, TEXT, END, TEXT), "not the last chunk alone"),
        (_stream(ROLE, {**TEXT, "id": "b"}, END), "several ids"),
        ("", "cannot be read"),
    ],
)
async def test_streams(text: str, told: str) -> None:
    [case] = [case for case in cases(MODELS) if case.name == "a stream of chunks ends with [DONE]"]
    headers = {"Content-Type": "text/event-stream"}
    async with _server(lambda request: httpx.Response(200, text=text, headers=headers)) as client:
        found = await ask(client, case)
    assert (found.outcome == "holds") == (told == "") and told in found.problem


async def test_statuses_headers_and_differences() -> None:
    async with _server(lambda request: httpx.Response(400, json={"a": 1})) as client:
        fails = await ask(client, Case("x", "y", "GET", "/z", status=404))
        assert fails.outcome == "fails" and "400 instead of 404" in fails.problem
        differs = await ask(client, Case("x", "y", "GET", "/z", status=404, ours="we like 400"))
        assert differs.outcome == "differs" and differs.problem.startswith("we like 400 (")
        assert (await ask(client, Case("x", "y", "GET", "/z", status=(404, 400), shape={"a": int}))).outcome == "holds"
        assert (
            "header X-A" in (await ask(client, Case("x", "y", "GET", "/z", status=400, headers={"X-A": "1"}))).problem
        )


async def test_a_server_of_nothing_fails_everywhere_and_one_without_models_is_asked_less() -> None:
    async with _server(lambda request: httpx.Response(200, text="{}")) as client:
        every = await run(client, MODELS)
        assert len(every) > 90 and not any(one.outcome == "holds" for one in every)
        fewer = await run(client, Models("chat"))
        assert 50 < len(fewer) < len(every)
        assert {one.api for one in await run(client, MODELS, {"tei"})} == {"tei"}


def test_events() -> None:
    assert events_of('event: a\ndata: {"b": 1}\n\n: comment\n\ndata: [DONE]\n\n') == [("a", {"b": 1}), ("", "[DONE]")]


def _server(handle: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://here")
