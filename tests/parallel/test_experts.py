"""Whole experts on ranks: when rows travel to them, and which of them lie on several."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engine.sockets import tcp_bytes
from serve_app.models.divided import check, placing
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.check import Verdict
from serve_app.parallel.dispatch import LOOPBACK, NVLINK, dispatched_bytes, least_rows, reached, summed_bytes
from serve_app.parallel.experts import folder_of, in_order, keep_loads, place_experts, read_loads
from serve_app.parallel.place import Place
from tests import tiny
from tests.parallel.groups import divided
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts
from tests.parallel.test_quantized import write
from tests.variants import some


def test_how_many_ranks_a_row_reaches():
    rng = random.Random(0)
    for experts, chosen, ranks in ((8, 2, 4), (8, 2, 8), (128, 8, 4), (256, 8, 64)):
        each = experts // ranks
        rows = [{expert // each for expert in rng.sample(range(experts), chosen)} for _ in range(4000)]
        mean = sum(map(len, rows)) / len(rows) / ranks
        assert reached(experts, chosen, ranks) == pytest.approx(mean, rel=0.03)


def test_rows_travel_where_that_sends_less():
    # Two of eight experts (Mixtral) on eight ranks: a fourth of the ranks is reached, which saves 3 of 8 bytes.
    assert reached(8, 2, 8) == 0.25
    assert dispatched_bytes(100, 4, 8, 0.25) == 0.625 * summed_bytes(100, 4, 8)
    # Every row has an expert everywhere: nothing is saved, however many rows there are.
    assert least_rows(8, 8, 2, 8192, LOOPBACK) == 0
    assert 0 < least_rows(8, 2, 4, 8192, LOOPBACK) < least_rows(128, 8, 4, 8192, LOOPBACK)
    assert least_rows(128, 8, 2, 8192, LOOPBACK) == 0
    # DeepSeek-V3 on the eight GPUs of a node: prompts of thousands of tokens, and no step of answers.
    assert 512 < least_rows(256, 8, 8, 7168 * 2, NVLINK) < 8192


@pytest.mark.parametrize("way", ["auto", "always"])
def test_rows_that_travel_to_something_else_stay(monkeypatch, way):
    """A family that only agrees with all rows on every rank is served so, unless its record insists."""
    looked = []

    def found(model_class, config, group, *, travels=False):
        looked.append(travels)
        return Verdict(differs="token 3 differs" if travels else "")

    monkeypatch.setattr(check, "check_divided", found)
    shares = SimpleNamespace(least=40)
    verdict = check.check_part(None, None, SimpleNamespace(place=Place(2, whole_experts=True, dispatch=way)), shares)
    assert (bool(verdict.differs), shares.least, looked) == (
        (False, 0, [True, False]) if way == "auto" else (True, 40, [True])
    )


@pytest.mark.parametrize(("experts", "ranks", "copies"), [(8, 2, 1), (64, 4, 2), (256, 8, 1), (4, 4, 3)])
def test_hot_experts_are_copied_and_dealt_out_evenly(experts, ranks, copies):
    rng = random.Random(experts)
    loads = [rng.paretovariate(0.8) for _ in range(experts)]
    placement = place_experts(loads, ranks, copies)
    assert {len(rank) for rank in placement.slots} == {experts // ranks + copies}
    assert sorted(placement.copies) == list(range(experts))
    found, plain = placement.imbalance(loads), in_order(experts, ranks).imbalance(loads)
    assert 1 <= found <= plain
    assert place_experts(loads, ranks, copies) == placement
    # One that everybody wants lies everywhere.
    hot = place_experts([1000.0] + [1.0] * (experts - 1), ranks, copies * ranks)
    assert len(hot.copies[0]) >= ranks
    assert hot.imbalance([1000.0] + [1.0] * (experts - 1)) < 1.1


def test_what_experts_had_to_do_is_kept(tmp_path):
    folder = folder_of(str(tmp_path), "@cf/me/mixture")
    assert read_loads(folder) == {}
    keep_loads(folder, "layers-0-2", {"layers.0": [10, 0], "layers.1": [1, 2]})
    keep_loads(folder, "layers-0-2", {"layers.0": [0, 10], "layers.1": [1, 2, 3]})
    # Older counts weigh less, and those of another model nothing.
    assert read_loads(folder) == {"layers.0": [9.0, 10.0], "layers.1": [1.0, 2.0, 3.0]}
    (folder / "broken.json").write_text('{"layers.0": [1, "')
    (folder / "other.json").write_text(json.dumps([1, 2]))
    assert read_loads(folder) == {"layers.0": [9.0, 10.0], "layers.1": [1.0, 2.0, 3.0]}
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


CASES = [("mixtral", 2, 1, "always"), ("qwen3_moe", 4, 1, "never"), ("deepseek_v3", 2, 2, "always")]


@pytest.mark.parametrize("case", some(CASES), ids=str)
def test_copies_follow_what_was_wanted(tmp_path, one_thread, monkeypatch, case):
    """What one start counts places the experts of the next, and answers stay what they are."""
    family, tensor, pipeline, dispatch = case
    path = tiny.write_checkpoint(tmp_path / family, family, **({"num_local_experts": 8} if family == "mixtral" else {}))
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(3)]
    monkeypatch.setattr(placing, "KEPT_S", 0.0)
    ways = {"expert_parallel": tensor, "expert_dispatch": dispatch, "expert_copies": 1}
    said = []
    for _ in range(2):
        with divided(path, tensor, pipeline, **ways) as found:
            said.append(found.ranks.states()[0]["expert_copies"])
            engine = tiny.make_engine(found.model, num_blocks=6, max_batch_tokens=23)
            assert generate(engine, prompts(3)) == expected
            assert found.lost == []
    assert said[0].startswith("as in the files")
    assert said[1].startswith("the busiest rank has 1.")
    loads = read_loads(folder_of(str(tmp_path), "@cf/tests/divided"))
    rows = {sum(counts) for counts in loads.values()}
    assert loads and min(rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits"), [("mixtral", 8), ("qwen2_moe", 4)])
def test_copies_are_rounded_to_fewer_bits_as_in_one_process(tmp_path, one_thread, monkeypatch, family, bits):
    path, quantization = write(tmp_path, family), f"int{bits}"
    alone = load_causal_lm(path, dtype="float32", quantization=quantization)
    expected = generate(tiny.make_engine(alone, num_blocks=100), prompts(6))
    monkeypatch.setattr(placing, "KEPT_S", 0.0)
    ways = {"expert_parallel": 2, "expert_dispatch": "always", "expert_copies": 1, "quantization": quantization}
    for _ in range(2):
        with divided(path, 2, **ways) as found:
            assert generate(tiny.make_engine(found.model, num_blocks=100), prompts(6)) == expected
            said = found.ranks.states()[0]["expert_copies"]
    assert said.startswith("the busiest rank has 1.")


@pytest.mark.slow
def test_bytes_are_those_of_the_formula(tmp_path, one_thread):
    """What rank 0's kernel counts for a prompt, with all rows everywhere and with rows that travel."""
    width, rows, layers = 512, 1500, 3
    path = tiny.write_checkpoint(
        tmp_path / "mixtral", "mixtral", num_local_experts=8, hidden_size=width, max_position_embeddings=4096
    )
    prompt = torch.randint(3, 250, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    sent, answers = {}, []
    for dispatch in ("never", "always"):
        with divided(path, 4, 1, expert_parallel=4, expert_dispatch=dispatch) as found:
            engine = tiny.make_engine(found.model, num_blocks=100, max_batch_tokens=2048)
            before = tcp_bytes()
            engine.add(tiny.make_request("one", prompt, max_tokens=1))
            answers.append(tiny.run_all(engine)["one"])
            sent[dispatch] = [now - was for now, was in zip(tcp_bytes(), before, strict=True)]
    assert answers[0] == answers[1]
    embedded = summed_bytes(rows, 4 * width, 4) / 2
    share = reached(8, 2, 4)
    wanted = {
        "never": layers * summed_bytes(rows, 4 * width, 4) + embedded,
        "always": layers * dispatched_bytes(rows, 4 * width, 4, share, 16) + embedded + embedded / 2,
    }
    for dispatch, bytes_ in sent.items():
        # Rank 0 is one of four, and experts are not wanted equally often.
        assert sum(bytes_) / 2 == pytest.approx(wanted[dispatch], rel=0.06), (sent, wanted)
    assert sum(sent["always"]) < 0.85 * sum(sent["never"])
