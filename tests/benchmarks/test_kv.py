"""The cache's benchmarks on the session's Ray, and with bytes that have changed on the way."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.checks import Checks
from benchmarks.kv import kv, turns
from serve_app.kv.disk import DiskTier
from serve_app.tasks.work import WorkerGone
from serve_app.wire.generate import Failed, GenerateCall, Generated, PromptPath
from serve_app.wire.tokens import TokenItem

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


class AnswersAtOnce:
    """A worker whose answer is over before the channel stands."""

    def __init__(self, *undelivered: TokenItem) -> None:
        self._undelivered = undelivered

    async def generate(self, call: GenerateCall) -> Generated | Failed:
        if not self._undelivered:
            return Failed("aborted")
        undelivered = tuple(replace(item, stream_id=call.id) for item in self._undelivered)
        return Generated("length", 0, PromptPath(), undelivered)


async def test_an_answer_that_the_channel_has_not_brought(inbox):
    """Nothing else would ever end its stream."""
    reader = turns.TimedClient(inbox)
    whole = AnswersAtOnce(TokenItem("", 0, (5,), None), TokenItem("", 1, (6, 7), "length"))
    _, tokens, _ = await asyncio.wait_for(reader.ask(whole, [1, 2], 3), 60)
    assert tokens == [5, 6, 7] and reader.checks.require() == 1


async def test_an_answer_that_is_not_whole(inbox):
    reader = turns.TimedClient(inbox)
    await reader.ask(AnswersAtOnce(TokenItem("", 0, (5,), "length")), [1, 2], 3)
    with pytest.raises(SystemExit, match="no figures(?s:.)*an answer: 1 tokens"):
        reader.checks.require()
    for gone, why in ((AnswersAtOnce(), "aborted"), (AnswersAtOnce(TokenItem("", 0, (5,), None)), "has 1 tokens")):
        with pytest.raises(WorkerGone, match=why):
            await asyncio.wait_for(reader.ask(gone, [1, 2], 3), 60)
