"""A model is deployed anew while streams of it run: every stream ends as if nothing had happened."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from deployments.model import model_application
from serve_app.catalog.load import load_catalog
from serve_app.config import load_settings
from serve_app.tasks.model import application_name
from tests.e2e.conftest import CHAT, eos_id

pytestmark = pytest.mark.slow
QUESTIONS = [f"What does {name} do?" for name in ("itertools.chain", "math.sqrt", "json.dumps", "os.path.join")]
# Streams that go on all the while; each asks anew when an answer is complete.
STREAMS = 8
TOKENS = 300


def body(question: str) -> dict:
    # Without an end of its own, so that answers are as long as is asked for.
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "logit_bias": {eos_id(): -100},
    }


def stream(client: httpx.Client, question: str) -> tuple[str, int]:
    """The text and the count of tokens of one streamed answer; raises unless it is complete."""
    text, usage, done = "", None, False
    with client.stream("POST", f"/run/{CHAT}", json={**body(question), "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                frame = json.loads(line[6:])
                assert "errors" not in frame, frame
                text += frame.get("response") or ""
                usage = frame.get("usage") or usage
    assert done and usage is not None, text
    return text, usage["completion_tokens"]


def redeploy(stack, **changed) -> None:
    """Deploys the chat model anew, with one of its deployments changed; returns once the new replicas serve."""
    settings = load_settings({"SERVE_APP_HOME": str(stack.home)})
    catalog = load_catalog(settings.home)
    record = catalog[CHAT]
    profile = record.serving["local"]
    decode = profile.decode.model_copy(update=changed)
    profile = profile.model_copy(update={"decode": decode})
    application = model_application(record, profile, settings, catalog.source(CHAT))
    serve.run_many([serve.RunTarget(target=application, name=application_name(CHAT), route_prefix=None)])


def test_streams_outlive_an_upgrade(stack, http):
    expected = {q: stream(http, q) for q in QUESTIONS}
    assert all(tokens == TOKENS for _, tokens in expected.values())
    before = decode_worker(stack)
    over = threading.Event()

    def keep_asking(number: int) -> int:
        answered = 0
        with httpx.Client(base_url=stack.api, headers=stack.headers, timeout=120) as client:
            while not over.is_set():
                question = QUESTIONS[(number + answered) % len(QUESTIONS)]
                assert stream(client, question) == expected[question]
                answered += 1
        return answered

    with ThreadPoolExecutor(STREAMS) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(STREAMS)]
        try:
            # Other options of the engine: its worker has to start anew.
            redeploy(stack, max_num_seqs=24)
            middle = decode_worker(stack)
            redeploy(stack)
        finally:
            over.set()
        answered = [one.result() for one in asking]
    assert all(answered), answered
    assert len({before, middle, decode_worker(stack)}) == 3, "the replicas have not been replaced"


def decode_worker(stack) -> int:
    """The process of the only decode worker, once the old one's replica has gone."""
    found: list[int] = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        models = httpx.get(f"{stack.url}/v1/status", headers=stack.headers, timeout=120).json()["models"]
        found = [w["pid"] for w in models[CHAT].get("workers", ()) if w["stage"] == "decode"]
        if len(found) == 1:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"decode workers: {found}")
