"""A batch on the running stack: a runner starts for it, runs it through the handler of its url, and is replaced."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.serving.processes import descendants
from serve_app.state.blobs.files import open_files
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, Counts
from serve_app.state.store.sql import SqlStore
from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT

URL = "/v1/chat/completions"


@pytest.fixture
def store(stack):
    with SqlStore(stack.home) as found:
        yield found


def submit(stack, store: SqlStore, batch_id: str, bodies: list[dict]) -> None:
    """As the API of OpenAI's batches writes one down."""
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": URL, "body": body} for n, body in enumerate(bodies)]
    open_files(str(stack.home / "files")).put(f"files/{batch_id}", "\n".join(map(json.dumps, lines)).encode())
    about = json.dumps({"endpoint": URL, "id": f"batch_{batch_id}"}).encode()
    now = time.time()
    batch = Batch(batch_id, "openai", Caller(ACCOUNT), now, now + 600, 600.0, about=about, input=f"files/{batch_id}")
    store.batches.create(batch)


def until(store: SqlStore, batch_id: str, true) -> Batch:
    limit = time.monotonic() + 120
    while not true(found := store.batches.find(ACCOUNT, batch_id)):
        assert time.monotonic() < limit, found
        time.sleep(0.05)
    return found


def asked(count: int, tokens: int) -> list[dict]:
    message = "Count to {}."
    return [
        {
            "model": CHAT,
            "messages": [{"role": "user", "content": message.format(n)}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        for n in range(count)
    ]


def test_a_batch_is_answered_as_single_requests_are(stack, http, store):
    bodies = asked(6, 4)
    submit(stack, store, "1" * 32, [*bodies, {"model": CHAT, "messages": "none"}])
    found = until(store, "1" * 32, lambda batch: batch.ended)
    assert found.status == "completed" and found.counts == Counts(7, 6, 1)
    files = open_files(str(stack.home / "files"))
    lines = [json.loads(line) for line in files.get(found.output).splitlines()]
    alone = http.post(f"{stack.url}{URL}", json=bodies[2]).json()
    assert lines[2]["response"]["body"]["choices"] == alone["choices"]
    assert found.used.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)


def test_requests_of_a_queue_are_answered_into_another(stack, http):
    top = f"{stack.url}/client/v4/accounts/{ACCOUNT}/queues"

    def post(path: str, body: dict) -> dict:
        answer = http.post(top + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    asks, answers = (post("", {"queue_name": name})["queue_id"] for name in ("asks", "answers"))
    post(f"/{asks}/consumers", {"type": "workers_ai", "model": CHAT, "results_queue": "answers"})
    body = {"prompt": "Count to 3.", "max_tokens": 4, "temperature": 0}
    post(f"/{asks}/messages", {"body": {**body, "external_reference": "row-1"}})
    limit = time.monotonic() + 120
    while not (found := post(f"/{answers}/messages/pull", {})["messages"]):
        assert time.monotonic() < limit
        time.sleep(0.05)
    told = json.loads(base64.b64decode(found[0]["body"]))
    alone = http.post(f"{stack.url}/client/v4/accounts/{ACCOUNT}/ai/run/{CHAT}", json=body).json()
    assert (told["status"], told["external_reference"]) == (200, "row-1")
    assert told["result"]["response"] == alone["result"]["response"]
    spent = http.get(f"{stack.url}/client/v4/accounts/{ACCOUNT}/ai/usage?group_by=batch").json()
    assert asks in json.dumps(spent)


@pytest.mark.slow
def test_a_runner_that_is_killed_is_replaced(stack, store):
    submit(stack, store, "2" * 32, asked(60, 16))
    until(store, "2" * 32, lambda batch: batch.counts.succeeded > 5)
    for pid in descendants(os.getpid())[1:]:
        if "ServeReplica:gateway:Batch" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    found = until(store, "2" * 32, lambda batch: batch.ended)
    assert found.status == "completed" and found.counts == Counts(60, 60)
