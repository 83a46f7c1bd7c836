"""A worker of several ranks or stages in the place of any other: grammars, drafts, the pool, what it tells."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
import pytest_asyncio

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.channel.inbox import TokenInbox
from serve_app.parallel.meeting import leave
from serve_app.worker.ranks import begin_ranks
from tests import tiny
from tests.models.heads.written import write_head
from tests.packed import write_float4
from tests.parallel import groups
from tests.worker.world import MemoryPool, call, prefill_call, read, start

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


WAYS = [
    ("llama", {"tensor_parallel": 2}),
    ("llama", {"pipeline_parallel": 2}),
    ("mixtral", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", {"tensor_parallel": 4, "expert_parallel": 4, "expert_dispatch": "always"}),
    ("deepseek_v3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("gpt_oss", {"tensor_parallel": 2, "expert_parallel": 2}),
    ("gpt_oss in four bits", {"tensor_parallel": 2}),
    ("qwen3_next", {"tensor_parallel": 2}),
    ("qwen3_next", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("llama with a head", {"tensor_parallel": 2, "pipeline_parallel": 2}),
]
HEAD = {"draft_method": "eagle3", "draft_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS, ids=str)
async def works(request, tmp_path_factory):
    """A worker of several ranks and one of a single process, with one pool; and what was lost."""
    family, ways = request.param
    folder = tmp_path_factory.mktemp("model")
    if family == "gpt_oss in four bits":
        write_float4(folder, vocab_size=6144, hidden_size=128, intermediate_size=192, num_hidden_layers=2)
    else:
        tiny.write_checkpoint(folder, family.partition(" ")[0], vocab_size=6144)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # for grammars
        shutil.copy(PROJECT_ROOT / "checkpoints" / "pico-instruct" / name, folder / name)
    pool, lost = MemoryPool(), []

    def begin(spec):
        return begin_ranks(
            spec, lambda *told: groups.start(spec, *told), "127.0.0.1", lambda step: None, end=lost.append
        )

    options = {"speculate_tokens": 4, "ngram": True, "always_draft": True}
    if family == "llama with a head":
        head = write_head(folder / "head", vocab_size=6144, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        options |= {**HEAD, "draft_weights": {"path": str(head)}}
    divided = start(folder, "decode", pool, begin=begin, **ways, **options)
    alone = start(folder, "decode", pool, **options)
    yield divided, alone
    for work in (divided, alone):
        await work.aclose()
    divided._ranks.close()
    leave()
    assert lost == []


@pytest_asyncio.fixture(loop_scope="module")
async def inbox():
    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


async def answer(work, inbox, ids, **sampling):
    asked = call(ids, inbox, **sampling)
    return await read(inbox, asked, lambda: work.generate(asked))


@pytest.mark.parametrize("sampling", [{}, {"grammar": "start: /[a-z ]{40}/"}, {"temperature": 0.9, "seed": 5}])
async def test_it_answers_as_one_process_does(works, inbox, sampling):
    divided, alone = works
    for seed, length in ((1, 5), (2, 70), (3, 300)):
        ids = prompt(seed, length)
        assert (await answer(divided, inbox, ids, **sampling))[0] == (await answer(alone, inbox, ids, **sampling))[0]


async def test_many_at_once(works, inbox):
    """Some with a grammar, some with drafts that stand."""
    divided, alone = works
    asked = [(prompt(20 + i, 20 + 30 * i), {"grammar": "start: /[a-z ]{30}/"} if i % 3 == 0 else {}) for i in range(12)]
    found = [
        [tokens for tokens, _ in await asyncio.gather(*(answer(work, inbox, ids, **more) for ids, more in asked))]
        for work in (divided, alone)
    ]
    assert found[0] == found[1]


async def test_each_takes_over_from_the_pool_what_the_other_has_computed(works, inbox):
    divided, alone = works
    for giving, taking, seed in ((divided, alone, 11), (alone, divided, 12)):
        ids = prompt(seed, 400)
        if keeps_states := bool(giving._engine.runner.kv.shape.states.parts):  # which go to the pool behind prompts
            await giving.prefill(prefill_call(ids))
        right, first = await answer(giving, inbox, ids)
        again, second = await answer(taking, inbox, ids)
        assert again == right and (keeps_states or first.path.computed == 400)
        assert second.path.node >= 256


async def test_it_tells_of_each_rank(works):
    divided, alone = works
    told = divided.stats().numbers["ranks"]
    assert [rank["rank"] for rank in told] == list(range(divided._ranks.leader.ranks)) and all(
        rank["pid"] for rank in told
    )
    assert alone.stats().numbers["ranks"] is None
