"""A worker whose model keeps states: it answers as transformers does, alone, and its pool gets and gives nothing."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.channel.inbox import TokenInbox
from serve_app.wire.generate import Generated
from tests import tiny
from tests.worker.world import MemoryPool, call, read, start


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3_next")


async def test_a_prompt_is_computed_here_and_found_again(model, one_thread):
    pool, inbox = MemoryPool(), TokenInbox()
    await inbox.start()
    work = start(model, "decode", pool, speculate_tokens=4, kv_cache_bytes=8 << 20)
    try:
        ids = np.random.default_rng(3).integers(3, 250, 300).tolist()
        wanted = tiny.reference_tokens(tiny.load_reference(model), ids, 16, eos_token_id=None)
        for cached in (0, 288):
            request = call(ids, inbox, prefill_above=10)
            tokens, result = await read(inbox, request, lambda request=request: work.generate(request))
            assert isinstance(result, Generated) and (tokens, result.cached) == (wanted, cached)
        assert len(pool.chunks) == 0
    finally:
        await work.aclose()
        await inbox.aclose()
