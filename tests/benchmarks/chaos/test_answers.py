"""What the chaos run holds answers to, and what it allows."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.chaos import books
from benchmarks.chaos.asks import asks
from benchmarks.chaos.books import Books
from benchmarks.chaos.clients import Clients, Way, _honest
from benchmarks.chaos.dialects import CHAT, MESSAGES, NATIVE, RESPONSES, Seen
from benchmarks.chaos.weather import BROKEN, REFUSED, Weather

USED = {"input_tokens": 3, "output_tokens": 4}


def seen(**places: str) -> Seen:
    return Seen(texts=dict(places), usage=(3, 4), finished=True)


def test_an_answer_is_held_to_every_token_and_to_its_usage():
    assert seen(a="some text").problem(seen(a="some text")) is None
    assert "the text" in str(seen(a="some tex").problem(seen(a="some text")))
    assert "the text" in str(seen(a="x", b="y").problem(seen(a="x")))
    fewer = Seen(texts={"a": "x"}, usage=(3, 3))
    assert "usage" in str(fewer.problem(seen(a="x")))
    shown = Seen(texts={"a": "x"}, usage=(3, 4), logprobs=3)
    assert "3 tokens were shown and 4 are counted" in str(shown.problem(seen(a="x")))
    assert "numbers" in str(Seen(numbers=[1.0, 2.0]).problem(Seen(numbers=[1.0, 2.1])))


def test_what_was_shown_before_a_break_is_the_beginning():
    assert Seen(texts={"a": "some"}).part_problem(seen(a="some text")) is None
    assert Seen().part_problem(seen(a="some text")) is None
    assert "beginning" in str(Seen(texts={"a": "other"}).part_problem(seen(a="some text")))
    assert "beginning" in str(Seen(texts={"b": "x"}).part_problem(seen(a="some text")))


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        (NATIVE, [{"response": "to"}, {"response": "day", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}]),
        (CHAT, [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("to", "day")]),
        (CHAT, [{"choices": [{"index": 0, "text": piece}]} for piece in ("to", "day")]),
        (RESPONSES, [{"type": "response.output_text.delta", "output_index": 0, "delta": p} for p in ("to", "day")]),
        (MESSAGES, [{"type": "content_block_delta", "index": 0, "delta": {"text": piece}} for piece in ("to", "day")]),
    ],
)
def test_streams_of_all_dialects(dialect, events):
    found = Seen()
    for event in events:
        dialect.event(found, event)
    assert found.texts == {"0": "today"} and found.error is None


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        (NATIVE, {"errors": [{"code": 3040}]}),
        (CHAT, {"error": {"code": 3040}}),
        (RESPONSES, {"type": "response.failed"}),
        (MESSAGES, {"type": "error", "error": {"type": "overloaded_error"}}),
    ],
)
def test_errors_in_streams_of_all_dialects(dialect, event):
    found = Seen()
    dialect.event(found, event)
    assert found.error and not found.finished


# -- what is allowed -------------------------------------------------------------------------------------------------


def test_a_refusal_is_allowed_while_a_fault_says_so_and_never_else():
    weather = Weather()
    before = time.monotonic()
    window = weather.begin("gateway-killed", frozenset({REFUSED}))
    assert weather.saw("status 503", REFUSED, "chat", before)
    assert not weather.saw("no end", BROKEN, "chat", before)
    window.end = time.monotonic()
    assert weather.saw("status 503", REFUSED, "chat", before)
    time.sleep(0.001)
    assert not weather.saw("status 503", REFUSED, "chat", time.monotonic())
    assert weather.broken == 2 and weather.broke[0]["during"] == ["gateway-killed"] and not weather.broke[1]["during"]


def test_an_honest_refusal_says_when_to_come_back_and_why():
    import httpx

    body, waits = {"errors": [{"code": 3040}]}, {"retry-after": "1"}
    assert _honest(httpx.Response(503, json=body, headers=waits))
    assert not _honest(httpx.Response(503, json=body))
    assert not _honest(httpx.Response(503, html="<h1>503</h1>", headers=waits))
    assert not _honest(httpx.Response(500, json=body, headers=waits))


@pytest.mark.parametrize(("status", "body"), [(500, b"{}"), (200, b"data: [DONE]\n\n"), (200, b"{}")])
async def test_a_server_that_answers_wrongly_breaks_the_run(liar, status, body):
    weather = Weather()
    clients = Clients(liar(status, body).url, "key", weather)
    number = next(i for i, ask in enumerate(asks()) if ask.name == "native short")
    clients._wanted[number, True] = Seen(texts={"0": "text"}, usage=(3, 4))
    await clients._once(number, Way(stream=True))
    assert weather.broken
    await clients.http.aclose()


async def test_answers_are_looked_up_in_the_books(liar, monkeypatch):
    """Whose trace says that the client left, and whose stored response is another, breaks the run."""
    import httpx

    monkeypatch.setattr(books, "LATE_S", 0.0)
    kept = Books()
    kept.note("responses", Seen(texts={"0": "text"}, usage=(3, 4), request="r1", response="resp_1"))
    for status, found, broken in ((500, {}, 2), (200, {"status": "left", "output": [], "id": "", "usage": USED}, 2)):
        weather = Weather()
        async with httpx.AsyncClient(base_url=liar(status, json.dumps(found).encode()).url) as http:
            assert await kept.check(http, weather) == 1
        assert weather.broken == broken, weather.broke
    right = {"status": "done", "events": [{"event": "done", "completion_tokens": 4}], "id": "resp_1", "usage": USED,
             "output": [{"type": "message", "content": [{"text": "text"}]}]}  # fmt: skip
    weather = Weather()
    async with httpx.AsyncClient(base_url=liar(200, json.dumps(right).encode()).url) as http:
        await kept.check(http, weather)
    assert not weather.broken
