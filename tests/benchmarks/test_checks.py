"""What counts as a right answer, and how a benchmark ends with a wrong one."""

from __future__ import annotations

import json

import pytest

from benchmarks.checks import Checks, chat_problem, stream_problem


def whole(text: str, tokens: int = 2) -> bytes:
    return json.dumps(
        {"choices": [{"index": 0, "message": {"content": text}}], "usage": {"completion_tokens": tokens}}
    ).encode()


def streamed(*parts: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    events = [json.dumps({"choices": [{"index": 0, "delta": {"content": part}}]}) for part in parts]
    return b"".join(f"data: {event}\n\n".encode() for event in events) + end


def test_right_answers_are_counted():
    checks = Checks()
    checks.add("whole", chat_problem(200, whole("a b"), text="a b", tokens=2))
    checks.add("streamed", stream_problem(200, b": waiting\n\n" + streamed("a ", "b"), text="a b"))
    assert checks.require() == 2


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (chat_problem(503, b'{"error": "loading"}'), 'status 503 instead of 200: \'{"error": "loading"}\''),
        (chat_problem(200, b"<html>"), "no chat completion"),
        (chat_problem(200, whole("")), "no text"),
        (chat_problem(200, whole("a c"), text="a b"), "the text is 'a c' instead of 'a b'"),
        (chat_problem(200, whole("a b", tokens=1), text="a b", tokens=2), "1 tokens instead of 2"),
        (stream_problem(429, b"busy"), "status 429"),
        (stream_problem(200, streamed("a ", end=b"")), "not complete"),
        (stream_problem(200, streamed("a "), text="a b"), "the text is 'a ' instead of 'a b'"),
        (stream_problem(200, b'data: {"error": "lost"}\n\ndata: [DONE]\n\n'), "the stream failed"),
        (stream_problem(200, b""), "no stream of a chat completion"),
    ],
)
def test_wrong_answers_are_told(problem, says):
    assert says in problem


def test_one_wrong_answer_ends_it():
    checks = Checks(right=999)
    checks.equal("the last one", "a", "b")
    with pytest.raises(SystemExit, match="1 of 1000 answers are wrong(?s:.)*the last one: 'a' instead of 'b'"):
        checks.require()


def test_nothing_checked_is_no_figure_either():
    with pytest.raises(SystemExit, match="no answer came"):
        Checks().require()
