"""Prefill and decode workers with an EAGLE-3 head: its K/V travel with the target's, and no answer changes."""

from __future__ import annotations

import asyncio

import pytest
import ray

from tests import tiny
from tests.deployments import workers
from tests.models.heads.written import write_head
from tests.worker.test_with_pool import prompt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


async def test_a_prompt_prefilled_elsewhere_is_drafted_for(ray_cluster, model, tmp_path):
    head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    told = {"draft_method": "eagle3", "draft_weights": {"path": str(head)}}
    prefill = workers.start(model, "prefill", **told)
    decode = workers.start(model, "decode", **told, speculate_tokens=3, draft_tokens=3, always_draft=True)
    reference = tiny.load_reference(model)
    try:
        before, _ = await asyncio.gather(decode.stats(), prefill.ready())
        async with workers.Caller() as caller:
            for seed, length in ((1, 300), (2, 517), (3, 40)):
                ids = prompt(seed, length)
                assert (await caller.prefill(prefill, ids)).cached == 0
                tokens, result = await caller.generate(decode, ids, max_tokens=40)
                assert tokens == tiny.reference_tokens(reference, ids, 40, eos_token_id=None)
                assert result.cached == length - 1
        stats = (await decode.stats()).numbers
        # The last token of each prompt is all that decode computed of them.
        assert stats["prompt_tokens"] - before.numbers["prompt_tokens"] == 3
        assert stats["speculation"]["proposed_tokens"] > 0
        assert not await decode.needs_draft()
    finally:
        ray.kill(prefill.actor)
        ray.kill(decode.actor)
