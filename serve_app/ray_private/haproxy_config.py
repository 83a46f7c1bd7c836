"""Sets right what Serve writes into HAProxy's configuration. ``haproxy.sh`` runs this file by its path before each
(re)load, with any Python: standard library only.

========================  ==============================================================================================
what Serve writes         what it becomes, and why
========================  ==============================================================================================
admin socket, mode 666    mode 600: whoever opens it can send all traffic, with keys and prompts, elsewhere
metrics, statistics       bound to loopback: they ask for no key
no time for headers       10 s for a request's headers, 75 s for an idle connection: half-sent headers hold no place
                          for long. A stream under way has neither bound
4,096 connections         16,384, or as many as the limit on open files allows; of one address at most half of them
``/-/routes``             404: it tells without a key what is served
all versions of HTTP      505 for those that no gateway reads, in the envelope
targets without a path    400 in the envelope (``GET x``): no backend takes them, which looked like no gateway
all methods, ``*``        405 for those that HTTP servers know nothing of and for ``OPTIONS *``, 400 for WebSockets of
                          any path but ``/realtime``: all in the envelope
no address of clients     ``x-serve-app-client`` is the client's address, whatever the client sends under that name
400 in plain text         400 in the envelope: a gateway's HTTP server says so of headers that HAProxy lets pass
two request ids           ``x-request-id`` is the gateway's: Serve's own is known to nobody
500 without a gateway     503 with ``Retry-After``, which clients retry, and the envelope in JSON
404 without a backend     503 as well: the gateway is not there yet, or not there any more
no gateways after a kill  those that the stand-in has (``stand_in.py``), until Serve knows of them again
answers of Serve's proxy  Requests pass Serve's own proxy until HAProxy knows a new gateway. Where that dies meanwhile,
                          its 500 without a reason becomes 503 as well: an answer of a gateway has a ``cf-ray``
========================  ==============================================================================================
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

HEADER_TIMEOUT_S = 10
IDLE_TIMEOUT_S = 75
# Of a WebSocket on which nothing is said; the gateway ends it before.
TUNNEL_TIMEOUT_S = 330
MAX_CONNECTIONS = 16384
# HAProxy wants five files for two connections, pipes included, and some for itself; it does not start where it may not.
FILES_OF_ITS_OWN = 500
RETRY_AFTER_S = 2  # serve_app/api/retry_after.py has the header for all that may import it
METHODS = "GET, POST, DELETE"
_FRONTENDS = ("frontend http_frontend", "frontend grpc_frontend")


def _body(code: int, kind: str, message: str) -> bytes:
    """An error in the envelope, as the gateway writes it."""
    shown = {"message": message, "type": kind, "param": None, "code": str(code)}
    errors = [{"code": code, "message": message}]
    return json.dumps({"success": False, "errors": errors, "messages": [], "result": {}, "error": shown}).encode()


def unavailable() -> bytes:
    """The whole HTTP answer where no gateway can be reached."""
    body = _body(3040, "server_error", "No gateway can take this request at the moment; please try again.")
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nCache-Control: no-cache\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def no_route() -> bytes:
    """The body of a 404."""
    return _body(7003, "invalid_request_error", "There is no such route. /docs lists the routes.")


def no_method() -> bytes:
    """The body of a 405."""
    return _body(7001, "invalid_request_error", f"This method is not available here; use {METHODS}.")


def no_version() -> bytes:
    """The body of a 505."""
    return _body(5006, "invalid_request_error", "This version of HTTP is not known here; use HTTP/1.1.")


def no_path() -> bytes:
    """The body of a 400 for a target that names no path."""
    return _body(5006, "invalid_request_error", 'A request\'s target begins with "/", as in GET /v1/models.')


def malformed() -> bytes:
    """The body of a 400 for what a gateway's HTTP server could not read."""
    said = "The target, a header or the WebSocket handshake is malformed; send them as RFC 9110 (RFC 6455) has them."
    return _body(5006, "invalid_request_error", said)


def no_websockets() -> bytes:
    """The body of a 400."""
    said = 'This path has no WebSocket. Send an HTTP request; with "stream": true it is answered by events.'
    return _body(5006, "invalid_request_error", said)


# Each lies beside the configuration in a file of its name.
BODIES = (no_route, no_method, no_version, no_path, malformed, no_websockets)


def _edge(folder: Path, most: int) -> list[str]:
    """What is done with each connection and request before Serve's own rules, and with each answer."""

    def refuse(status: int, name: str, more: str = "", when: str = "request") -> str:
        return f"    http-{when} return status {status} content-type application/json file {folder / name}{more} if "

    ours = "{ res.hdr(cf-ray) -m found }"
    return [
        "    stick-table type ipv6 size 64k expire 60s store conn_cur",
        "    tcp-request connection track-sc0 src",
        "    http-request set-header x-serve-app-client %[src]",
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {most // 2} }}",
        refuse(505, "no_version.json") + "!{ req.ver 1.0 1.1 2.0 }",
        refuse(405, "no_method.json", f' hdr allow "{METHODS}"') + "!{ method GET HEAD POST PUT PATCH DELETE OPTIONS }",
        refuse(405, "no_method.json", f' hdr allow "{METHODS}"') + "{ url * }",
        refuse(400, "no_path.json") + "!{ path_beg / }",
        refuse(400, "no_websockets.json") + "{ req.hdr(upgrade) -i -m sub websocket } !{ path_end /v1/realtime }",
        f"    http-response return status 503 default-errorfiles if {{ status 404 500:599 }} !{ours}",
        refuse(400, "malformed.json", when="response") + f"{{ status 400 }} !{ours}",
        f"    http-response set-header x-request-id %[res.hdr(cf-ray)] if {ours}",
    ]


def connections(files: int) -> int:
    """How many connections fit into ``files`` open files."""
    return max(256, min(MAX_CONNECTIONS, (files - FILES_OF_ITS_OWN) * 2 // 5)) if files > 0 else MAX_CONNECTIONS


def corrected(config: str, folder: Path) -> str:
    """``config`` with everything above set right; the answers are files in ``folder``. Twice is as good as once."""
    most = connections(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    lines: list[str] = []
    section = ""
    for line in config.splitlines():
        bare = line.strip()
        if bare.startswith(("errorfile ", "timeout http-request ", "timeout http-keep-alive ", "timeout tunnel ")):
            continue
        if re.fullmatch(r"http-request return .* if routes", bare):
            shown = "status 404 content-type application/json file"
            line = f"    http-request return {shown} {folder / 'no_route.json'} if routes"
        elif re.match(r"maxconn \S", bare):
            line = f"    maxconn {most}"
        elif bare.startswith("stats socket "):
            line = line.replace("mode 666", "mode 600")
        elif bare.startswith("http-request return status 404 "):
            line = "    http-request return status 503 default-errorfiles"
        elif bare.startswith(("frontend ", "listen ")):
            section = bare
        # The API listens where it was told to, which is everywhere (`*`) on a cluster.
        if section not in _FRONTENDS:
            line = re.sub(r"^(\s*bind )(\*|):", r"\g<1>127.0.0.1:", line)
        lines.append(line)
        if bare == "defaults":
            lines.append(f"    timeout http-request {HEADER_TIMEOUT_S}s")
            lines.append(f"    timeout http-keep-alive {IDLE_TIMEOUT_S}s")
            lines.append(f"    timeout tunnel {TUNNEL_TIMEOUT_S}s")
            # Serve has one text for all three.
            lines += [f"    errorfile {status} {folder / 'unavailable.http'}" for status in (502, 503, 504)]
        if bare == "frontend http_frontend" and "track-sc0 src" not in config:
            lines += _edge(folder, most)
    return "\n".join(lines) + "\n"


def split(config: str) -> tuple[str, str]:
    """What clients need of ``config``: its frontend for them and all backends; and all else."""
    parts: tuple[list[str], list[str]] = ([], [])
    where = parts[1]
    for line in config.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            where = parts[not (line.startswith("backend ") or line.split() == ["frontend", "http_frontend"])]
        where.append(line)
    return "".join(f"{line}\n" for line in parts[0]), "".join(f"{line}\n" for line in parts[1])


def for_stand_in(config: str) -> str:
    """``config`` without what listens for anybody but clients (``stand_in.py``)."""
    clients, rest = split(config)
    common = re.split(r"^(?:frontend|listen) ", rest, maxsplit=1, flags=re.M)[0]
    return re.sub(r"^\s+stats .*\n", "", common, flags=re.M) + clients


def main(path: Path) -> None:
    folder = path.parent
    (folder / "unavailable.http").write_bytes(unavailable())
    for body in BODIES:
        (folder / f"{body.__name__}.json").write_bytes(body())
    config = corrected(path.read_text(), folder)
    before = folder / "stand-in.cfg"
    if re.search(r"^\s*use_backend ", config, flags=re.M):
        before.write_text(for_stand_in(config))
    elif (folder / "stand-in.pid").exists():
        # Serve starts HAProxy before it has heard of gateways again; who stands in knows them.
        config = split(config)[1] + split(before.read_text())[0]
    path.write_text(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
