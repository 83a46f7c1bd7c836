"""The EAGLE-3 proposer against a head that drafts perfectly exactly if its part of the cache is what it should be."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from serve_app.engine.blocks import BlockPool
from serve_app.engine.engine import Engine
from serve_app.engine.kv_cache import KVShape
from serve_app.engine.runner import Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import HistoryModel, answer_alone, collect, random_prompt, request

MODEL = HistoryModel(spread=3.0)
SHAPE = KVShape.uniform(2, 1, 1, torch.float32)
PROMPTS = {str(i): random_prompt(i, 5 + 23 * i) for i in range(6)}


def forward(batch):
    """The target: its state of a token is the token, seen twice."""
    if batch.capture is not None:
        assert batch.capture.layers == (0, 0)
        batch.capture.states = batch.input_ids.float()[:, None, None].expand(-1, 2, 1)
    return MODEL.forward(batch)


class PerfectHead:
    """Keeps each slot's two tokens in its layer of the cache, and drafts what the target says to the history there."""

    layers = (0, 0)

    def __init__(self):
        self.passes: list[tuple[int, int]] = []
        self.fail = False

    def fuse(self, states):
        assert torch.equal(states[:, 0], states[:, 1])
        return states[:, 0]

    def __call__(self, batch, hidden):
        if self.fail:
            raise RuntimeError("broken head")
        self.passes.append((len(batch.input_ids), len(batch.sample_rows)))
        kv = batch.kv.layer(1)[:, :, 0, :, 0]
        for plane, values in zip(kv, (hidden[:, 0], batch.input_ids.float()), strict=True):
            plane.view(-1)[batch.slots] = values
        drafts, rows = [], set(batch.sample_rows.tolist())
        for index, seq_len in enumerate(batch.seq_lens.tolist()):
            first, last = batch.query_start[index : index + 2].tolist()
            table = batch.block_tables[index].long()
            own, following = (plane[table].reshape(-1)[:seq_len].numpy() for plane in kv)
            for row in range(first, last):
                position = int(batch.positions[row])
                assert position == seq_len - (last - row)
                if row in rows:
                    history = np.concatenate([own[:1], following[: position + 1]])
                    drafts.append(int(MODEL.logits(history).argmax()))
        return torch.tensor(drafts, dtype=torch.int64), batch.input_ids[batch.sample_rows].float()[:, None]


def build(*, num_blocks=100, spare=4, count=4, **options):
    runner = Runner(forward, SHAPE.allocate(num_blocks + spare, "cpu"))
    blocks = BlockPool(num_blocks + spare)
    head = PerfectHead()
    proposer = EagleProposer(head, runner.kv, blocks, spare)
    runner.observer = proposer
    speculation = Speculation(proposer, VerifyEverything(count))
    return Engine(runner, Scheduler(blocks, **options), speculation=speculation), head


def run(engine, prompts, **sampling):
    spare = engine.scheduler.blocks.used_blocks
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, **{"max_tokens": 50, "ignore_eos": True, "temperature": 0.0, **sampling}))
    answers = {name: answer.tokens for name, answer in collect(engine).items()}
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == spare
    return answers


def alone(prompts, **sampling):
    params = SamplingParams(**{"max_tokens": 50, "ignore_eos": True, "temperature": 0.0, **sampling})
    return {name: answer_alone(MODEL, prompt, params).tokens for name, prompt in prompts.items()}


def acceptance(engine) -> float:
    return engine.speculation.stats()["acceptance_rate"]


@pytest.mark.parametrize("name", PROMPTS)
def test_every_draft_stands_while_the_heads_cache_is_right(name):
    engine, _ = build()
    one = {name: PROMPTS[name]}
    assert run(engine, one) == alone(one)
    assert acceptance(engine) == 1.0
    # The first token comes with the prompt, the other 49 five at a time: chains cross block borders as well.
    assert engine.stats.steps == 11


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_chains_of_any_length(count):
    engine, _ = build(count=count)
    assert run(engine, PROMPTS) == alone(PROMPTS)
    assert acceptance(engine) == 1.0


def test_chunked_prefill():
    engine, _ = build(max_batch_tokens=19)
    assert run(engine, PROMPTS) == alone(PROMPTS)
    assert acceptance(engine) == 1.0


def test_a_cached_prefix_brings_the_heads_cache_along():
    engine, head = build()
    prompts = {"a": random_prompt(1, 200)}
    run(engine, prompts)
    assert max(tokens for tokens, _ in head.passes) > 150
    head.passes.clear()
    # The end of the first answer lies in the cache too, if the head read it before the request ended.
    longer = {"b": prompts["a"] + [7, 8, 9]}
    assert run(engine, longer) == alone(longer)
    assert engine.stats.cached_tokens >= 192
    assert max(tokens for tokens, _ in head.passes) < 20
    assert acceptance(engine) == 1.0


def test_a_prefill_worker_leaves_the_head_s_cache_behind():
    engine, _ = build()
    prompt = random_prompt(1, 200)
    engine.add(request("p", prompt[:-1], prefill_only=True))
    collect(engine)
    one = {"d": prompt}
    assert run(engine, one) == alone(one)
    assert engine.stats.cached_tokens == 192
    assert acceptance(engine) == 1.0


def test_preemption():
    engine, _ = build(num_blocks=9, spare=2, max_batch_tokens=50)
    assert run(engine, PROMPTS) == alone(PROMPTS)
    assert engine.scheduler.preemptions > 0
    assert acceptance(engine) > 0.7  # drafts for which there is no room are dropped unseen


def test_sampled_output_is_the_same_as_without_drafts():
    way = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.4}
    engine, _ = build()
    assert run(engine, PROMPTS, **way) == alone(PROMPTS, **way)
    assert 0.05 < acceptance(engine) < 0.9


def test_without_spare_blocks_chains_end_with_the_block():
    engine, _ = build(spare=0)
    assert run(engine, PROMPTS) == alone(PROMPTS)
    assert acceptance(engine) == 1.0


def test_what_is_not_drafted_is_still_read_block_by_block():
    engine, head = build()
    engine.speculation.controller.max_tokens = 0
    one = {"x": random_prompt(0, 10)}
    run(engine, one, max_tokens=200)
    assert [p for p in head.passes if p[0] >= 32] and not [p for p in head.passes if p[1]]
    assert len(head.passes) <= 7
    engine.speculation.controller.max_tokens = 4
    more = {"y": one["x"] + alone(one, max_tokens=200)["x"][:100]}
    assert run(engine, more) == alone(more)
    assert engine.stats.cached_tokens == 96
    assert acceptance(engine) == 1.0


def test_a_broken_head_costs_drafts_and_nothing_else():
    engine, head = build()
    head.fail = True
    assert run(engine, PROMPTS) == alone(PROMPTS)
    assert engine.speculation.stats()["accepted_tokens"] == 0
    head.fail = False
    other = {f"again-{k}": random_prompt(50 + int(k), 40) for k in PROMPTS}
    assert run(engine, other) == alone(other)
    assert engine.speculation.stats()["accepted_tokens"] > 0


def test_aborted_requests_leave_nothing():
    engine, _ = build()
    rng = random.Random(2)
    for index in range(20):
        engine.add(request(str(index), random_prompt(index, 30), max_tokens=30, ignore_eos=True, temperature=0.0))
        engine.step()
        if rng.random() < 0.5:
            engine.abort(str(index))
    while engine.has_work:
        engine.step()
    assert engine.speculation.proposers[0]._unread == {}
    engine.scheduler.blocks.check()
