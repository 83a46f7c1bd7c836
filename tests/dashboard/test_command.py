"""The link that signs in, as the command line prints it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from serve_app.config import api_key, cluster_secret, load_settings
from serve_app.dashboard_command import link
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key


async def test_the_link_signs_in_at_a_server_of_the_same_settings(tmp_path: Path):
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path)})
    url, _, code = link("http://0.0.0.0:8000", settings).partition("#code=")
    assert url == "http://127.0.0.1:8000/dashboard" and api_key(settings) not in code
    hashed, secret = hash_key(api_key(settings)), cluster_secret(settings).hex()
    gateway = Gateway(GatewaySettings("local", (hashed,), secret, str(tmp_path), "local"), lambda *_: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(gateway)), base_url="http://here") as http:
        answer = await http.post("/dashboard/session", json={"code": code})
        assert answer.status_code == 200 and answer.json()["expires"] > time.time()
    gateway.state.close()


def test_without_a_server_it_says_so(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    from serve_app.cli import main

    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    assert main(["dashboard"]) == 1 and "make serve" in capsys.readouterr().err
