"""Prompts with pictures and sounds on several ranks: rank 0 encodes them, and every rank computes with what it has
made."""

from __future__ import annotations

import pytest
import pytest_asyncio

from serve_app.channel.inbox import TokenInbox
from serve_app.parallel.meeting import leave
from serve_app.text.tokenizer import Tokenizer
from serve_app.worker.ranks import begin_ranks
from tests.parallel import groups
from tests.worker.test_media import LONG, SENSES, World
from tests.worker.world import MemoryPool, start

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
DIVISIONS = [
    ("llava", 2, 1),
    ("mistral3", 2, 1),
    ("gemma3", 2, 1),
    ("gemma3", 1, 2),
    ("qwen2_5_vl", 2, 1),
    ("qwen2_5_vl", 1, 2),
    ("qwen3_vl", 1, 2),
    ("llama4", 2, 1),
    ("voxtral", 2, 1),
    ("qwen2_audio", 1, 2),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DIVISIONS, ids=str)
async def world(request, tmp_path_factory):
    family, tensor, pipeline = request.param
    path = SENSES[family].write(tmp_path_factory.mktemp("model") / family, family)
    pool, inbox, lost = MemoryPool(), TokenInbox(), []
    await inbox.start()

    def begin(spec):
        return begin_ranks(
            spec, lambda *told: groups.start(spec, *told), "127.0.0.1", lambda step: None, end=lost.append
        )

    # Chunks of 48 tokens cut through files.
    options = {"max_batch_tokens": 48, "kv_cache_bytes": 1 << 20, "tensor_parallel": tensor}
    work = start(path, "decode", pool, begin=begin, pipeline_parallel=pipeline, **options)
    yield World(family, Tokenizer(path), SENSES[family].Truth(path), work, None, inbox)
    await work.aclose()
    work._ranks.close()
    leave()
    await inbox.aclose()
    assert lost == []


async def test_tokens_equal_generate(world):
    for said in (("*a", "What is it?"), (LONG, "*c", "*a", " then ", "*b", LONG), ("No file here.",)):
        prompt = world.prompt(*said)
        assert (await world.ask(prompt))[0] == world.wanted(prompt)
    assert world.wanted(world.prompt("*b", "What is it?")) != world.wanted(world.prompt("*d", "What is it?"))
