"""Steps of answers that all ranks record and replay together, on CPUs: a "graph" is the pass itself, padded to its size
(``tests/engine/gpu/test_graphs.py`` has that in one process).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from serve_app.engine.build import record_steps
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.parallel.graphs import LedGraphs, can_record
from serve_app.parallel.link import LinkAddress
from serve_app.parallel.place import Place
from serve_app.worker.spec import WorkerSpec
from tests import tiny
from tests.parallel import groups
from tests.parallel.groups import divided
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts
from tests.variants import some

SEQS = 8
# With four ranks each of two K/V heads lies on two of them.
DIVISIONS = [
    ("llama", 2, 1), ("llama", 4, 1), ("mixtral", 2, 1), ("gpt_oss", 2, 1), ("deepseek_v3", 2, 1),
    ("qwen3_moe", 4, 1, "never"),
]  # fmt: skip


def graphed(model: Any, **options: Any) -> Any:
    engine = tiny.make_engine(model, max_num_seqs=SEQS, **{"num_blocks": 100, **options})
    record_steps(engine.runner, SEQS, model.max_model_len)
    return engine


class Counted:
    """How often rank 0 has replayed a graph, by size."""

    def __init__(self, engine: Any) -> None:
        graphs = engine.runner.forward.own
        self.sizes: list[int] = []
        replay = graphs.replay
        graphs.replay = lambda batch, size: self.sizes.append(size) or replay(batch, size)


def failing(spec: WorkerSpec, rank: int, address: LinkAddress, line: Any) -> None:
    """A rank that can't record a graph of four."""
    from serve_app.engine.gpu.graphs import DecodeGraphs

    recording = DecodeGraphs.record

    def record(self: DecodeGraphs, size: int, *, adapted: bool = False) -> bool:
        return recording(self, size, adapted=adapted) and size != 4

    DecodeGraphs.record = record  # type: ignore[method-assign]
    groups.child(spec, rank, address, line)
    os._exit(0)


@pytest.mark.slow
def test_where_one_rank_can_not_record_none_has_graphs(tmp_path, one_thread, monkeypatch):
    path = tiny.write_checkpoint(tmp_path / "llama", "llama")
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    start = groups.start
    monkeypatch.setattr(groups, "start", lambda spec, rank, address: start(spec, rank, address, main=failing))
    with divided(path, 2) as found:
        engine = graphed(found.model)
        assert engine.runner.prepare()
        assert not engine.runner.prepare() and engine.runner.forward.own.captured == []
        counted = Counted(engine)
        assert generate(engine, prompts(8)) == expected and counted.sizes == []
        assert found.lost == []


@pytest.mark.slow
def test_stages_record_nothing(tmp_path, one_thread):
    path = tiny.write_checkpoint(tmp_path / "llama", "llama")
    with divided(path, 1, 2) as found:
        engine = graphed(found.model)
        assert not isinstance(engine.runner.forward, LedGraphs) and not engine.runner.prepare()


@pytest.fixture(scope="module", params=some(DIVISIONS, ("mixtral", 2, 1)), ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline, *whole = request.param
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / family, family)
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    ways = {"expert_parallel": tensor, "expert_dispatch": whole[0]} if whole else {}
    with divided(path, tensor, pipeline, **ways) as found:
        found.expected = expected
        yield found
        assert found.lost == []


def test_answers_through_all_sizes_are_those_of_generate(running):
    engine = graphed(running.model)
    counted = Counted(engine)
    while engine.runner.prepare():
        pass
    assert engine.runner.forward.own.captured == [1, 2, 4, 8]
    assert generate(engine, prompts(8)) == running.expected
    assert set(counted.sizes) >= {8} and len(counted.sizes) > NEW_TOKENS // 2
    for count in (1, 3):
        assert generate(engine, prompts(8)[:count]) == running.expected[:count]
    assert {1, 4} <= set(counted.sizes)


def test_they_are_recorded_while_answers_are_given(running):
    """Between two steps, the largest first, and with preemptions and pieces of prompts among the steps."""
    engine = graphed(running.model, num_blocks=13, max_batch_tokens=40)
    counted = Counted(engine)
    assert generate(engine, prompts(8)) == running.expected
    assert engine.runner.forward.own.captured and counted.sizes and engine.scheduler.preemptions > 0


def test_steps_with_drafts_are_computed_as_ever(running):
    engine = graphed(running.model)
    engine.speculation = Speculation([NgramProposer()], VerifyEverything(4), vocab_size=256)
    assert generate(engine, prompts(8)) == running.expected


@pytest.mark.parametrize(
    ("place", "can"),
    [
        (Place(4), True), (Place(2, 2), False), (Place(2, whole_experts=True, dispatch="never"), True),
        (Place(2, whole_experts=True, dispatch="auto"), False),
    ],
)  # fmt: skip
def test_what_can_be_recorded(place, can):
    assert can_record(place) is can
