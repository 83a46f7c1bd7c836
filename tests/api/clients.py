"""Unmodified clients whose transport stays inside the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from cloudflare import Cloudflare
from openai import OpenAI

MODEL = "@cf/pico/pico-instruct"


def sent_by(call: Callable[[httpx.Client], Any], answer: bytes = b'{"result": {}}', status: int = 200) -> httpx.Request:
    """The request that a client sends: its transport is ours, so that nothing leaves the process."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, content=answer, headers={"content-type": "application/json"})

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        call(http)
    return seen[0]


def cloudflare(http: httpx.Client) -> Cloudflare:
    return Cloudflare(api_token="t", base_url="http://localhost/client/v4", http_client=http, max_retries=0)


def client(http: httpx.Client) -> OpenAI:
    return OpenAI(api_key="t", base_url="http://localhost/v1", http_client=http, max_retries=0)
