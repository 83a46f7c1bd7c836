"""HAProxy before the gateways: private, quiet about what is served, and soon there again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from serve_app.cluster import read_attachment
from serve_app.run_directory import processes_in


@pytest.fixture
def folder(stack) -> Path:
    """The run folder of the running server."""
    return Path(read_attachment(stack.home).token_path).parent


def haproxies(folder: Path) -> set[int]:
    return set(processes_in(folder / "haproxy"))


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
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
        urllib.request.urlopen(f"{stack.url}/-/routes", timeout=5)
    assert refused.value.code == 404 and json.load(refused.value)["errors"][0]["code"] == 7003


def test_a_killed_haproxy_comes_back(stack, folder: Path) -> None:
    """Nobody meets a 404 meanwhile, which no client would retry."""
    before = haproxies(folder)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    seen, until = set(), time.monotonic() + 60
    while 200 not in seen and time.monotonic() < until:
        seen.add(status(f"{stack.url}/health"))
        time.sleep(0.05)
    assert 200 in seen and seen <= {0, 200, 503}
    assert haproxies(folder) and not haproxies(folder) & before
