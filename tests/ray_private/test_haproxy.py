"""What HAProxy answers by itself, and what it changes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import ModelLoading
from serve_app.ray_private import haproxy_config
from serve_app.ray_private.haproxy import SCRIPT, haproxy_environment
from tests.waiting import wait_for


def test_its_own_answer_is_one_of_ours() -> None:
    head, _, body = haproxy_config.unavailable().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["Content-Type"] == "application/json" and headers["Retry-After"].isdigit()
    assert int(headers["Content-Length"]) == len(body)
    like = openai_body(ModelLoading("@cf/a/b", retry_after=2.0))
    others = (haproxy_config.no_route(), haproxy_config.no_method(), haproxy_config.no_websockets())
    for shown in map(json.loads, (body, *others)):
        assert shown.keys() == like.keys() and shown["error"].keys() == like["error"].keys()
    assert json.loads(body)["errors"][0]["code"] == like["errors"][0]["code"]


@pytest.mark.parametrize(("files", "most"), [(-1, 16384), (1 << 20, 16384), (20_000, 7800), (1024, 256)])
def test_connections_fit_into_the_limit_on_open_files(files: int, most: int) -> None:
    assert haproxy_config.connections(files) == most


# What Serve writes, without what is not looked at here.
SERVES = """global
    stats socket {folder}/s mode 666 level admin expose-fd listeners
    maxconn 4096
defaults
    mode http
    timeout connect 2s
    timeout client 20s
    timeout server 20s
    errorfile 503 {folder}/serves.http
frontend http_frontend
    bind 127.0.0.1:{port}
    acl routes path -i /-/routes
    http-request return status 200 content-type text/plain string "told" if routes
    acl is_gateway path_beg /
    use_backend gateway if is_gateway
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "not found"
backend gateway
    server one 127.0.0.1:{gateway}
"""


class Gateway(BaseHTTPRequestHandler):
    """Stands behind HAProxy and names the request as Serve and as the gateway do."""

    def do_GET(self) -> None:
        # To the key of RFC 6455's example.
        accept = "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        head = ("HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade", accept, "cf-ray: ours")
        self.wfile.write("\r\n".join([*head, "", ""]).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])) + self.path.encode()
        if self.path == "/client":
            body = ",".join(self.headers.get_all("x-serve-app-client") or ()).encode()
        if self.path.startswith("/serve/"):
            self.send_error(int(self.path.removeprefix("/serve/")))
            return
        self.send_response(500 if self.path == "/fails" else 200)
        for name, value in {"X-Request-ID": "Serve's", "cf-ray": "ours", "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def edge(tmp_path_factory) -> Iterator[int]:
    """The port of an HAProxy that has such a configuration, set right, and a gateway behind it."""
    folder = tmp_path_factory.mktemp("haproxy")
    behind = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "haproxy.cfg"
    config.write_text(SERVES.format(folder=folder, port=port, gateway=behind.server_port))
    environment = {**os.environ, **haproxy_environment()}
    running = subprocess.Popen([str(SCRIPT), "-db", "-f", str(config)], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens(port))
        yield port
    finally:
        running.terminate()
        running.wait()
        behind.shutdown()
        behind.server_close()


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def asked(port: int, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request that is written by hand."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        lines = [head, "Host: here", f"Content-Length: {len(body)}", "Connection: close"]
        if "Upgrade" in head:
            del lines[2:]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


WEBSOCKET = (
    "GET {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
)


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("OPTIONS * HTTP/1.1", 405, 7001),
        ("BREW /v1/models HTTP/1.1", 405, 7001),
        ("TRACE /v1/models HTTP/1.1", 405, 7001),
        (WEBSOCKET.format(path="/v1/chat/completions"), 400, 5006),
        (WEBSOCKET.format(path="/v1/realtime/x"), 400, 5006),
        ("GET /-/routes HTTP/1.1", 404, 7003),
    ],
)
def test_what_haproxy_refuses_is_in_the_envelope(edge, head, status, code) -> None:
    found, headers, body = asked(edge, head)
    assert found == status and headers["content-type"] == "application/json"
    assert json.loads(body)["errors"][0]["code"] == code
    assert status != 405 or headers["allow"] == "GET, POST, DELETE"


def test_only_one_path_has_websockets(edge) -> None:
    status, headers, _ = asked(edge, WEBSOCKET.format(path="/v1/realtime?intent=transcription"))
    assert status == 101 and headers["upgrade"] == "websocket"


def test_an_answer_has_one_request_id(edge) -> None:
    status, headers, body = asked(edge, "POST /v1/x HTTP/1.1\r\nX-Request-ID: the client's", b"{}")
    assert status == 200 and body == b"{}/v1/x"
    assert headers["x-request-id"] == headers["cf-ray"] == "ours"


def test_gateways_know_the_address_of_clients_and_nobody_can_say_another(edge) -> None:
    lie = "X-Serve-App-Client: 10.1.2.3"
    for head in ("", f"\r\n{lie}", f"\r\n{lie}\r\n{lie}"):
        assert asked(edge, f"POST /client HTTP/1.1{head}", b"{}")[2] == b"127.0.0.1"


def test_what_serve_answers_without_a_gateway_can_be_retried(edge) -> None:
    for path in ("/serve/500", "/serve/404", "/serve/503"):
        status, headers, body = asked(edge, f"POST {path} HTTP/1.1", b"{}")
        assert status == 503 and int(headers["retry-after"]) > 0
        assert json.loads(body)["errors"][0]["code"] == 3040
    # What a gateway says stays.
    assert asked(edge, "POST /fails HTTP/1.1", b"{}")[0] == 500
    assert asked(edge, "POST /serve/400 HTTP/1.1", b"{}")[0] == 400
