"""What a running server leaves in its logs, its state and its traces: nothing of a prompt or an answer, and no key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.stack import Server
from serve_app.cluster import read_attachment
from tests.conftest import _free_port, share_weights
from tests.e2e.conftest import CHAT, EMBED, RERANK
from tests.waiting import wait_for

MARKER = "xylophone7391"
ASK = {"model": CHAT, "messages": [{"role": "user", "content": f"Say {MARKER} again."}], "max_tokens": 8}
ASKS = [
    ("/v1/chat/completions", ASK),
    ("/v1/chat/completions", {**ASK, "stream": True}),
    ("/v1/messages", ASK),
    ("/v1/responses", {"model": CHAT, "input": MARKER, "store": False, "max_output_tokens": 8}),
    ("/v1/embeddings", {"model": EMBED, "input": [MARKER]}),
    ("/v1/rerank", {"model": RERANK, "query": MARKER, "documents": [MARKER, "another"]}),
    # Refused in three ways: as a body, by its length, by the model.
    ("/v1/chat/completions", {**ASK, "temperature": MARKER}),
    ("/v1/chat/completions", {**ASK, "messages": [{"role": "user", "content": f"{MARKER} " * 6000}]}),
    ("/v1/chat/completions", {**ASK, "lora": MARKER}),
]


def ask_everything(url: str, key: str) -> str:
    """What traces tell of the requests, once they are all written."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120) as http:
        answers = [http.post(path, json=body) for path, body in ASKS]
        assert [answer.status_code == 200 for answer in answers] == [True] * 6 + [False] * 3
        http.post(f"{url}/dashboard/session", json={"key": f"{MARKER} is no key"}, headers={"Authorization": ""})
        ids = {answer.headers["cf-ray"] for answer in answers[:6]}

        def listed() -> str:
            told = http.get("/v1/requests?limit=1000")
            return told.text if ids <= {one["id"] for one in told.json()["result"]} else ""

        return wait_for(listed) + http.get(f"/v1/requests/{min(ids)}").text


def files_with(secret: str, *folders: Path) -> list[Path]:
    """Weights are not ours, and the key lies in one file of its own, where its owner alone reads it."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.is_file() and "weights" not in path.parts and path.name != "api_key":
            try:
                text = path.read_bytes()
            except OSError:  # it has gone meanwhile
                continue
            if secret.encode() in text:
                found.append(path)
    return found


def look(home: Path, url: str, key: str) -> Path:
    """Asks, and finds nothing. The folder of Ray's logs."""
    logs = Path(read_attachment(home).logs).resolve().parent
    traces = ask_everything(url, key)
    assert any(logs.rglob("*.log")) and list(home.glob("state.sqlite3*"))
    for secret in (MARKER, key):
        assert files_with(secret, home, logs) == [] and secret not in traces
    return logs


def test_nothing_on_the_running_server(stack):
    look(stack.home, stack.url, stack.key)


@pytest.mark.slow
def test_nothing_with_logs_as_json(tmp_path, monkeypatch):
    share_weights(tmp_path)
    with monkeypatch.context() as alone:
        # What this process tells its own server.
        for name in [name for name in os.environ if name.startswith(("RAY_", "SERVE_APP_"))]:
            alone.delenv(name)
        server = Server(_free_port(), SERVE_APP_HOME=str(tmp_path), SERVE_APP_LOG="json")
    try:
        server.start()
        logs = look(tmp_path, server.url, server.key)
        lines = [line for path in logs.rglob("*.log") for line in path.read_text(errors="replace").splitlines()]
        for line in lines:
            if line.startswith('{"time"'):
                assert {"level", "process", "message"} <= json.loads(line).keys()
    finally:
        server.stop()
