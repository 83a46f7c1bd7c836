"""JSON lines: what they hold and what they leave out."""

from __future__ import annotations

import io
import json
import logging

import pytest

from serve_app import logs
from serve_app.api import trace_context
from serve_app.api.errors import current_request
from serve_app.gateway.http.request_id import ids_at_hand


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch):
    """``written(log, ...)``: the line that a logger writes."""
    monkeypatch.setenv("SERVE_APP_LOG", "json")
    out = io.StringIO()
    logger = logging.getLogger("serve_app.of_this_test")
    logger.propagate = False

    def line(message: str, *args: object, ids=logs.at_hand.get, **more: object) -> dict:
        handler = logging.StreamHandler(out)
        handler.setFormatter(logs.JsonLines("gateway", ids))
        logger.handlers = [handler]
        logger.error(message, *args, **more)
        return json.loads(out.getvalue().splitlines()[-1])

    return line


def test_a_line_has_the_ids_of_the_request_and_its_trace(written):
    assert "request_id" not in written("nothing %d", 1)
    token = current_request.set("ab" * 16)
    try:
        found = written("lost %d\nworkers", 3, ids=ids_at_hand)
        assert (found["request_id"], found["trace_id"]) == ("ab" * 16, "ab" * 16)
        assert (found["message"], found["level"], found["process"]) == ("lost 3\nworkers", "error", "gateway")
        trace_context.current.set(trace_context.TraceContext("cd" * 16, "ef" * 8, True))
        assert written("x", ids=ids_at_hand)["trace_id"] == "cd" * 16
    finally:
        trace_context.current.set(None)
        current_request.reset(token)
    logs.at_hand.set(("one", "two"))
    assert written("x")["trace_id"] == "two"
    logs.at_hand.set(("", ""))


def test_what_an_exception_says_is_left_out_unless_wanted(written, monkeypatch):
    def shown() -> dict:
        try:
            raise ValueError("the prompt was: my secret diary")
        except ValueError:
            return written("it failed", exc_info=True)

    found = shown()
    assert "diary" not in json.dumps(found) and found["error"]["type"] == "ValueError"
    assert found["error"]["at"][-1].endswith(" shown")
    monkeypatch.setenv("SERVE_APP_LOG_CONTENT", "true")
    assert shown()["error"]["message"] == "the prompt was: my secret diary"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer {}",
        "api_key={} was refused",
        '"X-Api-Key": "{}"',
        "postgresql+psycopg://me:{}@host/db is away",
        "password: {}",
    ],
)
def test_keys_and_passwords_are_taken_out(written, text):
    found = written(text.format("abcdef0123456789"))
    assert "abcdef0123456789" not in found["message"] and "..." in found["message"]


def test_text_stays_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_LOG", "text")
    before = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    logs.set_up("gateway")
    logs.write("serve", "  1.0 s  Ray is up")
    assert capsys.readouterr().out == "  1.0 s  Ray is up\n"
    assert [(handler, handler.formatter) for handler in logging.getLogger().handlers] == before
    monkeypatch.setenv("SERVE_APP_LOG", "json")
    logs.write("serve", "  1.0 s  Ray is up")
    assert json.loads(capsys.readouterr().out)["message"] == "1.0 s  Ray is up"
