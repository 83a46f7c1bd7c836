"""HTTP/1.0 knows no chunks: its answers have a length, streams among them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from serve_app.gateway.http.app import build_http
from tests.tasks.conftest import KEY, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_settle import CHAT


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_has_a_length_where_there_are_no_chunks(serve, version) -> None:  # noqa: F811
    body = orjson.dumps({"model": CHAT, "messages": [{"role": "user", "content": "one two"}], "stream": True})
    sent: list[dict[str, Any]] = []

    wanted = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(wanted, None)) is None:
            await asyncio.Event().wait()  # the client stays
        return message or {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with serve(models=(CHAT,)) as served:
        served.gateway.backends[CHAT] = EchoBackend()
        path = "/v1/chat/completions"
        scope = {"type": "http", "http_version": version, "method": "POST", "path": path, "raw_path": path.encode(),
                 "headers": [(b"authorization", f"Bearer {KEY}".encode())], "query_string": b"", "root_path": "",
                 "scheme": "http", "server": ("here", 80), "client": ("there", 1)}  # fmt: skip
        await build_http(served.gateway)(scope, receive, send)
    told = b"".join(message.get("body", b"") for message in sent[1:])
    assert sent[0]["status"] == 200 and b"one" in told and told.endswith(b"data: [DONE]\n\n")
    lengths = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths == ([len(told)] if version == "1.0" else []) and (len(sent) == 2) == (version == "1.0")
    assert served.endings == [("text-generation", "done")]
