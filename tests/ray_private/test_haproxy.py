"""What HAProxy answers by itself, and what it changes."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import ModelLoading
from serve_app.api.retry_after import wait_told
from serve_app.ray_private import haproxy_config, stand_in
from serve_app.ray_private.haproxy import SCRIPT, haproxy_environment
from serve_app.run_directory import end_processes, processes_in
from tests.waiting import wait_for


def test_its_own_answer_is_one_of_ours() -> None:
    head, _, body = haproxy_config.unavailable().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["Content-Type"] == "application/json" and wait_told(headers) == haproxy_config.RETRY_AFTER_S
    assert int(headers["Content-Length"]) == len(body)
    like = openai_body(ModelLoading("@cf/a/b", retry_after=2.0))
    config = haproxy_config
    for shown in map(json.loads, (body, *(made() for made in config.BODIES))):
        assert shown.keys() == like.keys() and shown["error"].keys() == like["error"].keys()
    assert json.loads(body)["errors"][0]["code"] == like["errors"][0]["code"]


@pytest.mark.parametrize(("files", "most"), [(-1, 16384), (1 << 20, 16384), (20_000, 7800), (1024, 256)])
def test_connections_fit_into_the_limit_on_open_files(files: int, most: int) -> None:
    assert haproxy_config.connections(files) == most


def test_on_a_cluster_the_api_listens_everywhere_and_nothing_else_does(tmp_path) -> None:
    served = SERVES.format(folder=tmp_path, port=8000, gateway=8001).replace("bind 127.0.0.1:", "bind *:")
    inner = "frontend prometheus\n    bind :9101\nlisten stats\n  bind *:8404\n"
    # Whatever the order of sections is.
    for written in (inner + served, served + inner):
        told = haproxy_config.corrected(haproxy_config.corrected(written, tmp_path), tmp_path)
        assert sorted(re.findall(r"(?m)^ *bind (\S+)", told)) == ["*:8000", "127.0.0.1:8404", "127.0.0.1:9101"]


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
    # mirroring the use_backend rules
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
        if "refused" in self.path:
            # As a gateway refuses a WebSocket.
            self.send_response(int(self.path[-3:]))
            for name, value in {"content-type": "application/json", "cf-ray": "ours", "content-length": "2"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")
            return
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
        end_processes(folder)
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
        ("GET x HTTP/1.1", 400, 5006),
        ("GET ? HTTP/1.1", 400, 5006),
        ("GET foo:bar HTTP/1.1", 400, 5006),
        ("CONNECT here:80 HTTP/1.1", 405, 7001),
        ("GET / HTTP/3.7", 505, 5006),
        ("GET /health HTTP/2.1", 505, 5006),
    ],
)
def test_what_haproxy_refuses_is_in_the_envelope(edge, head, status, code) -> None:
    found, headers, body = asked(edge, head)
    assert found == status and headers["content-type"] == "application/json"
    assert json.loads(body)["errors"][0]["code"] == code
    assert status != 405 or headers["allow"] == "GET, POST, DELETE"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /", 400),
        ("GET / HTTP/1", 400),
        ("GET / http/1.1", 400),
        ("GET / HTTP/1.1 x", 400),
        ("G@T / HTTP/1.1", 400),
        ("GET /\x7f HTTP/1.1", 400),
        ("GET / HTTP/1.1\r\nno colon", 400),
        ("GET / HTTP/1.1\r\nx: " + "a" * 40_000, 400),
        ("GET / HTTP/1.0\r\nTransfer-Encoding: chunked", 413),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", 422),
    ],
)
def test_what_haproxy_cannot_read_it_refuses_in_html(edge, head, status) -> None:
    """As docs/api.md has it: no setting replaces these answers."""
    found, headers, body = asked(edge, head)
    assert found == status and headers["content-type"] == "text/html"
    assert body.startswith(f"<html><body><h1>{status} ".encode())


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
    assert asked(edge, "POST /serve/401 HTTP/1.1", b"{}")[0] == 401


def test_what_a_gateways_http_server_cannot_read_is_refused_in_the_envelope(edge) -> None:
    status, headers, body = asked(edge, "POST /serve/400 HTTP/1.1", b"{}")
    assert status == 400 and headers["content-type"] == "application/json"
    assert json.loads(body)["errors"][0]["code"] == 5006
    # What a gateway refuses itself keeps its reason.
    for refused in (400, 401, 404, 429, 503):
        assert asked(edge, WEBSOCKET.format(path=f"/v1/realtime?refused={refused}"))[::2] == (refused, b"{}")


@contextmanager
def started(folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(SCRIPT), "-db", "-f", str(folder / "haproxy.cfg"), "-dR", *more]
    running = subprocess.Popen(command, env={**os.environ, **haproxy_environment()}, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def admin_says(folder: Path) -> bytes:
    """What the admin socket tells of the process that answers it."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
        admin.connect(str(folder / "s"))
        admin.sendall(b"show info\n")
        return b"".join(iter(lambda: admin.recv(65536), b""))
    return b""


def answers_of(folder: Path, pid: int) -> bool:
    return f"\nPid: {pid}\n".encode() in admin_says(folder)


def of_stand_in(folder: Path) -> int:
    try:
        return int((folder / stand_in.STAND_IN).read_text())
    except (OSError, ValueError):
        return 0


def test_a_killed_one_is_stood_in_for_until_there_is_another(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = SERVES.format(folder=tmp_path, port=port, gateway=1)
    (tmp_path / "haproxy.cfg").write_text(config)
    with started(tmp_path) as first, socket.socket() as client:
        wait_for(lambda: answers_of(tmp_path, first.pid))
        first.kill()
        first.wait()
        wait_for(lambda: of_stand_in(tmp_path) and listens(port))
        # Serve is to see that its own has ended.
        assert admin_says(tmp_path) == b""
        assert asked(port, "GET /x HTTP/1.1")[0] == 503
        client.connect(("127.0.0.1", port))  # is under way while another takes over
        with started(tmp_path) as second:
            wait_for(lambda: answers_of(tmp_path, second.pid))
            client.sendall(b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 503")
            client.close()
            wait_for(lambda: not of_stand_in(tmp_path))
            # A reload: the one that ends has a successor.
            with started(tmp_path, "-sf", str(second.pid)) as third:
                wait_for(lambda: answers_of(tmp_path, third.pid))
                second.wait(60)
                wait_for(lambda: len(watching(tmp_path)) == 1)
                assert not of_stand_in(tmp_path)
    end_processes(tmp_path)


def watching(folder: Path) -> list[int]:
    return [pid for pid in processes_in(folder) if b"stand_in.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_stand_in_listens_for_clients_alone() -> None:
    config = SERVES.format(folder="/f", port=1, gateway=2)
    more = "frontend prometheus\n    bind :3\nlisten stats\n    bind :4\n    stats enable\n"
    kept = haproxy_config.for_stand_in(config.replace("frontend http_frontend", more + "frontend http_frontend") + more)
    assert kept.count("bind ") == 1 and "stats" not in kept and "server one" in kept and "timeout server" in kept


def test_gateways_are_known_at_once_where_one_stood_in(tmp_path: Path) -> None:
    """Serve starts HAProxy before it has heard of gateways."""
    whole = SERVES.format(folder=tmp_path, port=1, gateway=2)
    empty = whole.replace("    acl is_gateway path_beg /\n    use_backend gateway if is_gateway\n", "")
    empty = empty.partition("backend gateway")[0] + "listen stats\n    bind :4\n"
    path = tmp_path / "haproxy.cfg"

    def corrected(config: str) -> str:
        path.write_text(config)
        haproxy_config.main(path)
        return path.read_text()

    full = corrected(whole)
    assert "server one" not in corrected(empty)
    (tmp_path / stand_in.STAND_IN).write_text("1")
    again = corrected(empty)
    assert again.count("frontend http_frontend") == 1 and "use_backend gateway" in again and "server one" in again
    assert "stats socket" in again and "listen stats" in again
    assert haproxy_config.for_stand_in(again) == haproxy_config.for_stand_in(full)
