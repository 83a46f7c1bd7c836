"""HAProxy before the gateways: private, quiet about what is served, and soon there again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from serve_app.cluster import read_attachment
from serve_app.run_directory import processes_in
from tests.e2e.conftest import CHAT


@pytest.fixture
def folder(stack) -> Path:
    """The run folder of the running server."""
    return Path(read_attachment(stack.home).token_path).parent


def serving(folder: Path) -> set[int]:
    """The HAProxy processes."""
    return {pid for pid in processes_in(folder / "haproxy") if command(pid).endswith(b"haproxy")}


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return b""


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


def test_sockets_lie_where_only_their_user_can_go(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    admin = list((folder / "haproxy").glob("*/s"))
    assert admin and all(stat.S_IMODE(socket.stat().st_mode) == 0o600 for socket in admin)
    assert list((folder / "ray").glob("session_*/sockets/raylet*"))


def test_what_is_served_is_not_told_without_a_key(stack) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{stack.url}/-/routes", timeout=60)
    assert refused.value.code == 404 and json.load(refused.value)["errors"][0]["code"] == 7003


def test_an_answer_has_one_id_and_it_is_known(stack, http) -> None:
    answer = http.post(f"/run/{CHAT}", json={"prompt": "Hi", "max_tokens": 2}, headers={"X-Request-ID": "the client's"})
    assert answer.headers.get_list("x-request-id") == [answer.headers["cf-ray"]]
    known = http.get(f"{stack.url}/v1/requests/{answer.headers['x-request-id']}")
    assert known.status_code == 200 and known.json()["status"] == "done"


def test_a_stream_to_http_1_0_has_no_chunks(stack) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 3, "stream": True}).encode()
    url = urllib.parse.urlsplit(stack.api)
    lines = [f"POST {url.path}/run/{CHAT} HTTP/1.0", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in stack.headers.items()]
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, told = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head and b"transfer-encoding" not in head.lower()
    assert told.startswith(b"data: {") and told.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/3.7", 505),
        ("GET x HTTP/1.1", 400),
        ("GET http:// HTTP/1.1", 400),
        # HAProxy lets it pass, the gateway's HTTP server does not.
        ("GET /health HTTP/1.1\r\nX: a\x01b", 400),
    ],
)
def test_a_malformed_request_is_refused_and_not_told_to_come_again(stack, head, status) -> None:
    url = urllib.parse.urlsplit(stack.url)
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        told = json.load(answer)
    assert answer.status == status and answer.headers["retry-after"] is None
    assert told["errors"][0]["code"] == 5006 and told["error"]["message"]


def test_a_refused_websocket_keeps_its_reason(stack) -> None:
    url = urllib.parse.urlsplit(stack.url)
    asked = {**stack.headers, "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    with closing(connection):
        headers = {**asked, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # of RFC 6455's example
        connection.request("GET", "/v1/realtime?intent=conversation", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 400 and json.load(answer)["error"]["param"] == "intent"


def test_a_killed_haproxy_is_stood_in_for_and_comes_back(stack, folder: Path) -> None:
    """Nobody meets a 404 meanwhile, which no client would retry."""
    before = serving(folder)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    seen, stood_in = set(), None
    until = time.monotonic() + 60
    while not (stood_in and serving(folder) - before - {stood_in}) and time.monotonic() < until:
        if (answer := status(f"{stack.url}/health")) == 200 and stood_in is None:
            # Serve has seen nothing yet, so it is not Serve's own.
            stood_in = int(next((folder / "haproxy").glob("*/stand-in.pid")).read_text())
        seen.add(answer)
        time.sleep(0.05)
    assert stood_in and serving(folder) - before - {stood_in}
    assert 200 in seen and seen <= {0, 200, 503}
    # It leaves once another listens.
    while stood_in in serving(folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert stood_in not in serving(folder) and status(f"{stack.url}/health") == 200
