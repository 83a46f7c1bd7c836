"""What one division of a model has computed every other takes over from the pool, and answers as ``generate`` does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import numpy as np
import pytest

from serve_app.channel.inbox import TokenInbox
from serve_app.parallel.meeting import leave
from serve_app.worker.ranks import begin_ranks
from tests import tiny
from tests.models.heads.written import write_head
from tests.parallel import groups
from tests.worker.world import MemoryPool, call, prefill_call, read, start

pytestmark = pytest.mark.slow
LENGTH, ANSWER = 300, 16
# Ranks that divide layers, and stages. Rank 0 of each is this process, so that there is one at a time.
DIVISIONS = ((4, 1), (2, 1), (1, 2), (2, 2), (1, 1))
HEAD = {"draft_method": "eagle3", "speculate_tokens": 3, "draft_tokens": 3, "always_draft": True}
FAMILIES = {"llama": {}, "llama with a head": HEAD, "deepseek_v3": {}, "mixtral": {"expert_parallel": True}}


def prompt(division: tuple[int, int]) -> list[int]:
    """One that is ``division``'s to compute."""
    return np.random.default_rng(sum(division) * 10 + division[0]).integers(3, 256, LENGTH).tolist()


@contextlib.asynccontextmanager
async def working(folder, pool, division, **options):
    lost = []

    def begin(spec):
        return begin_ranks(
            spec, lambda *told: groups.start(spec, *told), "127.0.0.1", lambda step: None, end=lost.append
        )

    tensor, pipeline = division
    if options.pop("expert_parallel", False) and tensor > 1:
        options["expert_parallel"] = tensor
    several = {"begin": begin} if tensor * pipeline > 1 else {}
    work = start(folder, "decode", pool, tensor_parallel=tensor, pipeline_parallel=pipeline, **several, **options)
    try:
        yield work
    finally:
        await work.aclose()
        if several:
            work._ranks.close()
            leave()
    assert lost == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_division_takes_over_from_every_other(tmp_path, one_thread, family):
    folder = tiny.write_checkpoint(tmp_path / "model", family.partition(" ")[0])
    options = dict(FAMILIES[family])
    if options.get("draft_method"):
        head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        options["draft_weights"] = {"path": str(head)}
    reference = tiny.load_reference(folder)
    right = {d: tiny.reference_tokens(reference, prompt(d), ANSWER, eos_token_id=None) for d in DIVISIONS}
    pool = MemoryPool()
    took: set[tuple[tuple[int, int], tuple[int, int]]] = set()

    async def takes(work, inbox, taking, giving):
        asked = call(prompt(giving), inbox, max_tokens=ANSWER)
        tokens, result = await read(inbox, asked, lambda: work.generate(asked))
        assert tokens == right[giving], (taking, giving)
        # The last token of a prompt is always computed.
        assert (result.path.node, result.path.computed) == (LENGTH - 1, 1), (taking, giving, result.path)
        took.add((taking, giving))

    async def visit():
        inbox = TokenInbox()
        await inbox.start()
        try:
            for index, division in enumerate(DIVISIONS):
                async with working(folder, pool, division, **options) as work:
                    for giving in DIVISIONS[:index]:
                        await takes(work, inbox, division, giving)
                    done = await work.prefill(prefill_call(prompt(division)))
                    assert done.cached == 0
            for index, division in reversed(list(enumerate(DIVISIONS[:-1]))):
                async with working(folder, pool, division, **options) as work:
                    for giving in DIVISIONS[index + 1 :]:
                        await takes(work, inbox, division, giving)
                    if options.get("draft_method"):
                        assert work.stats().numbers["speculation"]["proposed_tokens"] > 0
        finally:
            await inbox.aclose()

    asyncio.run(visit())
    assert took == set(itertools.permutations(DIVISIONS, 2))
