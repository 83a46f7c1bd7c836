"""The serving benchmarks on the session's stack, in a few requests each, and on servers that answer wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from benchmarks import ROOT
from benchmarks.checks import Checks
from benchmarks.serving import cancellation, fairness, from_zero, interference, serving, startup, tenants
from serve_app.state.store.sql import SqlStore

CHAT = "@cf/pico/pico-instruct"
SHORT = json.dumps({"choices": [{"index": 0, "delta": {"content": "other words"}}]}).encode()
OTHER_WORDS = b"data: " + SHORT + b"\n\ndata: [DONE]\n\n"


def figures(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# -- on the running stack --------------------------------------------------------------------------------------------


def test_serving(stack, capsys):
    assert serving.main(["--home", str(stack.home), "--concurrency", "2", "--rounds", "1", "--json"]) == 0
    found = figures(capsys)
    assert found["load"][0]["requests"] == 4 and found["prefix"]["ratio"] > 0


@pytest.mark.slow
def test_cancellation(stack):
    """In a process of its own, since it asks workers as a driver does that is none of Serve's replicas."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "benchmarks", "cancellation", "--home", str(stack.home), "--requests", "1"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["streamed"]["p50_ms"] > 0


@pytest.mark.parametrize(
    "few", [["--parts", "light", "--seconds", "0.3"], pytest.param(["--seconds", "2"], marks=pytest.mark.slow)]
)
def test_fairness(stack, capsys, monkeypatch, few):
    if "--parts" in few:
        monkeypatch.setattr(tenants, "TOKENS", 8)
    try:
        assert fairness.main(["--home", str(stack.home), "--rounds", "1", *few, "--json"]) == 0
    finally:
        for name in ("light", "heavy"):
            with SqlStore(stack.home) as store:
                store.accounts.remove(name)
    found = figures(capsys)
    assert found["light"]["ratio"] > 0
    assert "--parts" in few or found["goodput"]["goodput_4x_per_s"] > 0


def test_first_tokens(stack):
    """What startup and from_zero wait for; both start a server of their own, which takes too long here."""
    checks = Checks()
    assert startup.first_token(stack.url, stack.key, checks) is not None
    client = from_zero.Client(stack.url, stack.key, CHAT)
    assert client.stream()["first_token_s"] > 0
    client.without_patience()
    assert checks.require() == 1 and client.checks.require() == 2


@pytest.mark.slow
def test_interference(ray_cluster, capsys, checkpoint_here):
    few = ["--size", "tiny", "--streams", "2", "--prompt", "64", "--under-way", "1", "--seconds", "0.3"]
    assert interference.main([*few, "--rounds", "1", "--beside", "chunked", "--json"]) == 0
    assert set(figures(capsys)["sides"]) == {"chunked", "disaggregated"}


@pytest.mark.slow
def test_startup(capsys):
    assert startup.main(["--rounds", "0", "--idle", "1", "--json"]) == 0
    assert figures(capsys)["first"]["first_token_s"] > 0


@pytest.mark.slow
def test_from_zero(capsys):
    assert from_zero.main(["--rounds", "1", "--json"]) == 0
    assert figures(capsys)["first_token_s"] > 0


# -- on servers that answer wrongly ----------------------------------------------------------------------------------


def test_a_first_stream_of_other_words(liar):
    checks = Checks()
    assert startup.first_token(liar(200, OTHER_WORDS).url, "key", checks) is not None
    with pytest.raises(SystemExit, match="no figures.*(?s:.)*the text is 'other words'"):
        checks.require()
    with pytest.raises(SystemExit, match="the text is 'other words'"):
        from_zero.Client(liar(200, OTHER_WORDS).url, "key").stream()


def test_a_server_that_loads_is_waited_for(liar):
    checks = Checks()
    assert startup.first_token(liar(503, b"{}").url, "key", checks) is None
    assert startup.first_token("http://127.0.0.1:1", "key", checks) is None
    assert not checks.wrong


@pytest.mark.parametrize(("status", "body"), [(503, b"loading"), (200, b"data: [DONE]\n\n")])
def test_serving_of_no_tokens(liar, capsys, status, body):
    with pytest.raises(SystemExit, match="no figures"):
        asyncio.run(serving.measure(liar(status, body).url, "key", 1, 2, "wrong", Checks()))
    assert capsys.readouterr().out == ""


def test_cancellation_of_a_stream_that_does_not_begin(liar, capsys):
    class Engine:
        def wait(self, busy: bool) -> float:
            raise AssertionError("the stream's beginning is looked at first")

    wrong, checks = liar(503, b"loading"), Checks()
    with pytest.raises(SystemExit, match="no figures(?s:.)*status 503"):
        asyncio.run(cancellation.cancelled(Engine(), wrong.port, "key", checks, stream=True, end="2"))


def test_fairness_with_answers_that_are_too_short():
    def answer(tokens: int) -> bytes:
        return json.dumps({"result": {"response": "a", "usage": {"completion_tokens": tokens}}}).encode()

    assert tenants.problem(200, answer(tenants.TOKENS)) is None and tenants.problem(429, b"") is None
    assert "status 200" in str(tenants.problem(200, answer(tenants.TOKENS - 1)))
    assert "status 500" in str(tenants.problem(500, b"broken"))
