"""The cache's benchmarks on the session's Ray, and with bytes that have changed on the way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.checks import Checks
from benchmarks.kv import kv, turns
from serve_app.kv.disk import DiskTier
from serve_app.wire.address import InboxAddress
from serve_app.wire.generate import GenerateCall, Generated, PromptPath

FEW = ["--mib", "1", "--rounds", "1", "--chunks", "2", "--index", "50"]


def test_chunks(ray_cluster, capsys):
    assert kv.main([*FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["fetch_2_chunks_ms"] > 0 and found["disk_read_ms"] > 0


def test_a_file_with_other_bytes(monkeypatch):
    monkeypatch.setattr(DiskTier, "read", lambda self, meta: np.zeros(meta.nbytes, np.uint8))
    checks = Checks()
    kv.disk_seconds(1, 2, checks)
    with pytest.raises(SystemExit, match="2 of 2 answers are wrong(?s:.)*other bytes than were written"):
        checks.require()


def test_turns(ray_cluster, capsys, checkpoint_here):
    assert turns.main(["--size", "tiny", "--context", "512", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["turn_over_cold"] > 0 and found["paths"]["turn"]["node"] >= 512


async def test_an_answer_that_is_too_short():
    class Inbox:
        address = InboxAddress("127.0.0.1", 1, b"secret")

        def open_stream(self, name: str, start: int):
            async def nothing():
                return
                yield

            return nothing()

    class Worker:
        async def generate(self, call: GenerateCall) -> Generated:
            return Generated("length", 0, PromptPath(), ())

    reader = turns.TimedClient(Inbox())
    await reader.ask(Worker(), [1, 2], 3)
    with pytest.raises(SystemExit, match="no figures(?s:.)*an answer: 0 tokens"):
        reader.checks.require()
