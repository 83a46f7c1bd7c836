"""Buckets and padding of decode graphs, on CPU: a "graph" is the function itself."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch

from serve_app.engine.gpu.graphs import DecodeGraphs, bucket_sizes
from tests import tiny

NEW_TOKENS = 24


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 256) for _ in range(rng.randrange(1, 100))] for _ in range(count)]


class Counted:
    """A capture whose graphs count how often they are replayed."""

    def __init__(self, capture=lambda run: run) -> None:
        self.capture, self.replays = capture, 0

    def __call__(self, run):
        replay = self.capture(run)

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def graphed_engine(model, max_num_seqs: int = 8, capture=None, num_blocks: int = 200, **options):
    capture = capture or Counted()
    engine = tiny.make_engine(model, num_blocks=num_blocks, max_num_seqs=max_num_seqs, **options)
    engine.runner.forward = DecodeGraphs(
        model.forward, engine.runner.kv, max_num_seqs=max_num_seqs, max_model_len=model.max_model_len, capture=capture
    )
    engine.runner.between_steps = engine.runner.forward.prepare_when_due
    return engine


def replays(engine) -> int:
    return engine.runner.forward._capture.replays


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model"), "mistral")
    return tiny.load(path), tiny.load_reference(path)


def generate(engine, batch):
    for index, prompt in enumerate(batch):
        # Different lengths, so that the batch shrinks through the buckets.
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS - 2 * index))
    outputs = tiny.run_all(engine)
    return [outputs[str(i)] for i in range(len(batch))]


def test_tokens_equal_generate_through_all_buckets(model):
    model, reference = model
    engine = graphed_engine(model)
    while engine.runner.forward.prepare():
        pass
    assert engine.runner.forward.captured == [1, 2, 4, 8]
    batch = prompts(8)
    expected = [tiny.reference_tokens(reference, p, NEW_TOKENS - 2 * i) for i, p in enumerate(batch)]
    assert generate(engine, batch) == expected
    assert replays(engine) > 10
    engine = graphed_engine(model, num_blocks=13)
    assert generate(engine, batch) == expected
    assert engine.scheduler.preemptions > 0


def test_padding_touches_the_trash_block_only(model):
    model, _ = model
    engine = graphed_engine(model)
    graphs = engine.runner.forward
    generate(engine, prompts(3))
    before = engine.runner.kv.planes[0].clone()
    engine.scheduler.forget_cache()
    graphs._resume_at = float("inf")  # keep to the graph of eight
    assert graphs.captured[-1] == 8
    graphs._replay = {8: graphs._replay[8]}
    engine.add(tiny.make_request("x", [5, 6, 7], max_tokens=3))
    outputs = tiny.run_all(engine)
    assert replays(engine)
    changed = {int(b) for b in (engine.runner.kv.planes[0] != before).any(-1).any(-1).any(-1).any(0).any(0).nonzero()}
    assert len(outputs["x"]) == 3
    assert len(changed - {0}) == 1


def test_largest_first_and_not_before_the_first_token_is_out(model):
    model, _ = model
    engine = graphed_engine(model)
    graphs = engine.runner.forward
    generate(engine, prompts(1))
    assert graphs.captured[-1] == 8
    assert replays(engine) == NEW_TOKENS - 2  # of a batch of one, every decode step but the first
    while graphs.prepare():
        pass
    assert list(graphs._replay) == [8, 4, 2, 1]


def test_without_graphs_where_capturing_fails(model):
    model, reference = model

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = graphed_engine(model, capture=fails)
    batch = prompts(2)
    assert generate(engine, batch)[0] == tiny.reference_tokens(reference, batch[0], NEW_TOKENS)
    assert not engine.runner.forward.captured and not engine.runner.forward.prepare()


def test_chunks_and_foreign_caches_run_as_they_are(model):
    model, reference = model
    engine = graphed_engine(model, max_batch_tokens=16)
    batch = prompts(4)
    assert generate(engine, batch)[3] == tiny.reference_tokens(reference, batch[3], NEW_TOKENS - 6)
    assert not engine.runner.forward._allows(dataclasses.replace(engine.runner.forward._first(1), kv=torch.zeros(1)))


def test_an_idle_loop_prepares(model):
    import queue

    from serve_app.engine.loop import EngineLoop

    outputs: queue.Queue = queue.Queue()
    engine = graphed_engine(model[0])
    engine.runner.prepare = engine.runner.forward.prepare
    loop = EngineLoop(engine, outputs.put)
    until = time.monotonic() + 30
    while len(engine.runner.forward.captured) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    loop.stop()
    assert engine.runner.forward.captured == [1, 2, 4, 8]


def test_bucket_sizes():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    sizes = bucket_sizes(256)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-1] == 256
    assert all(b / a <= 2 for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.slow
def test_steps_run_ahead_over_graphs(model):
    """The logits of all graphs are one buffer, which the step that is launched next overwrites."""
    from serve_app.engine.gpu.overlap import OverlapEngine

    model, reference = model
    plain = graphed_engine(model, max_batch_tokens=40)
    engine = OverlapEngine(plain.runner, plain.scheduler)
    batch = prompts(8)
    expected = [tiny.reference_tokens(reference, p, NEW_TOKENS - 2 * i) for i, p in enumerate(batch)]
    assert generate(engine, batch) == expected
    assert replays(engine) > 10


def test_batches_with_adapters_have_graphs_of_their_own(model, monkeypatch):
    """Captured once there is one, and again over the same addresses: the places of rows are copied there."""
    model, _ = model
    seen: list[list[int] | None] = []

    def watching(batch):
        seen.append(None if batch.adapters is None else batch.adapters.tolist())
        return model.forward(batch)

    engine = graphed_engine(model)
    graphs = engine.runner.forward
    graphs.forward = watching
    while graphs.prepare():
        pass
    assert graphs.captured == [1, 2, 4, 8] and set(map(type, seen)) == {type(None)}
    assert generate(engine, prompts(2)) and not graphs._adapted
    seen.clear()
    batch = prompts(3)
    for index, prompt in enumerate(batch):
        request = tiny.make_request(f"a{index}", prompt, max_tokens=NEW_TOKENS)
        request.adapter = index
        engine.add(request)
    tiny.run_all(engine)
    assert max(graphs._adapted) == 8
    while graphs.prepare():
        pass
    assert sorted(graphs._adapted) == [1, 2, 4, 8]
    assert [0, 1, 2, 0, 0, 0, 0, 0] in seen
    # One that cannot be captured leaves the others theirs.
    graphs.refuse(adapted=True)
    assert graphs.captured == [1, 2, 4, 8] and not graphs._adapted and not graphs.prepare()
