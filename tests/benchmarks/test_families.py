"""Model families are exact or refused: some of each kind always, every architecture of transformers where asked for."""

from __future__ import annotations

import faulthandler
import json
import os

import numpy as np
import pytest
import transformers
from transformers import BertConfig, BertModel

from benchmarks.families import DOCS, encoding
from benchmarks.families.architectures import TASKS, architectures
from benchmarks.families.generation import LENGTHS, lengths_of
from benchmarks.families.run import run_all
from benchmarks.families.table import page, summary
from benchmarks.families.work import examine
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading.miniature import Sizes, build
from tests.variants import some

TINY = BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=256,
)  # fmt: skip

# Most were wrong, crashed or failed with an error of their own before the checks at load.
SERVED = [
    ("Phi3ForCausalLM (longrope)", "transformers' forward"),
    ("Ministral3ForCausalLM (scaled queries)", "transformers' forward"),
    ("LlamaForCausalLM (biases, tied)", "fast layer"),
    ("FalconH1ForCausalLM", "transformers' forward"),
]
MORE_SERVED = [
    ("Llama4ForCausalLM", "transformers' forward"),
    ("DeepseekV3ForCausalLM (equal head sizes)", "transformers' forward"),
    ("GPTNeoForCausalLM", "transformers' forward"),
    ("GPTBigCodeForCausalLM (a K/V head per head)", "transformers' forward"),
    ("Gemma4ForCausalLM", "transformers' forward"),
    ("GptOssForCausalLM", "fast layer"),
    ("FalconForCausalLM (new decoder)", "transformers' forward"),
    ("StableLmForCausalLM", "transformers' forward"),
    ("GPT2LMHeadModel", "transformers' forward"),
    ("CamembertForCausalLM", "transformers' forward"),
    ("PhimoeForCausalLM (longrope)", "transformers' forward"),
    ("BertGenerationDecoder", "transformers' forward"),
    ("DeepseekV32ForCausalLM", "transformers' forward"),
    ("DeepseekV4ForCausalLM", "transformers' forward"),
    ("GlmMoeDsaForCausalLM", "transformers' forward"),
]
REFUSED = [
    ("RecurrentGemmaForCausalLM", "keeps something of a text"),
    ("DiffLlamaForCausalLM", "calls attention 8 times"),
    ("FalconForCausalLM (alibi)", "ALiBi"),
    ("BartForCausalLM", "takes no positions"),
    ("GitForCausalLM", "attention"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def line_of(label: str, seed: int = 0):
    [found] = [a for a in architectures(("text-generation",)) if a.label == label]
    return examine(found, seed)


@pytest.mark.parametrize(("label", "served"), some(SERVED, SERVED[0], names=2), ids=[label for label, _ in SERVED])
def test_served_exactly(label, served):
    line = line_of(label)
    assert (line.verdict, line.served) == ("exact", served), line


@pytest.mark.slow
@pytest.mark.parametrize(("label", "served"), MORE_SERVED, ids=[label for label, _ in MORE_SERVED])
def test_more_are_served_exactly(label, served):
    test_served_exactly(label, served)


@pytest.mark.parametrize(("label", "reason"), REFUSED, ids=[label for label, _ in REFUSED])
def test_refused_by_name(label, reason):
    line = line_of(label)
    assert line.verdict == "refused" and reason in line.note, line


@pytest.mark.slow
def test_odd_sizes_are_exact_as_well():
    assert line_of("Phi3ForCausalLM (longrope)", seed=3).verdict == "exact"


def test_a_process_that_ends_is_a_line(monkeypatch):
    [llama] = [a for a in architectures(("text-generation",)) if a.label == "LlamaForCausalLM"]
    broken = type(llama)(llama.task, "llama", "LlamaForCausalLM", "crash", {"num_hidden_layers": "crash"})
    monkeypatch.setattr("benchmarks.families.run.serve", _crash)
    [line] = run_all([broken], 0, 1, start="fork")
    assert line.verdict == "failed" and "signal 6" in line.note
    assert "1 failed" in summary([line]) and "| LlamaForCausalLM, crash | failed |" in page([line], "0")


def _crash(connection, architecture, seed):
    faulthandler.disable()  # which would print where this process was
    os.abort()


def test_the_speed_of_a_family_is_one_object(monkeypatch, capsys):
    from benchmarks.families import speed

    monkeypatch.setattr(speed, "SIZES", Sizes(layers=2, window=256, chunk=256, original=512, context=1024))
    monkeypatch.setattr(speed, "PROMPT", 5)
    monkeypatch.setattr(speed, "NEW", 3)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    code = speed.measure("FalconForCausalLM", None)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    [family] = found["families"].values()
    assert family["served"] == "transformers' forward" and set(family["ratio"]) == {"1", "8"}
    assert found["failed"] == [] and found["least"] == min(family["ratio"].values())
    assert code == (1 if found["missed"] else 0)


def test_families_that_miss_are_named():
    from benchmarks.families.speed import summary

    plain = {"served": "transformers' forward", "ratio": {"1": 1.4, "8": 2.0}}
    found = summary({"A": plain, "B": {**plain, "ratio": {"1": 1.5, "8": 2.0}}, "C": {"failed": "x"}})
    assert (found["least"], found["missed"], found["failed"]) == (1.4, ["A"], ["C"])
    assert summary({"D": {**plain, "served": "fast layer"}})["missed"] == []


def test_the_noise_of_float32_is_measured(tmp_path):
    """Attention that is all or nothing multiplies roundings; a wrong result is wrong all the same."""
    own = build(BertModel, TINY)
    noise = {}
    for peaked in (1.0, 100.0):
        for layer in own.encoder.layer:
            layer.attention.self.query.weight.mul_(peaked)
        own.save_pretrained(tmp_path)
        model = load_encoder(tmp_path, "embeddings")
        texts = [np.arange(5, 5 + n, dtype=np.int32) for n in (9, 40)]
        rows = np.stack([encoding._alone(own, ids, model, "text-embeddings") for ids in texts])
        truth, noise[peaked] = encoding.exactly(own, texts, rows, model, "text-embeddings")
        assert truth.dtype == np.float64 and encoding.distances(rows, truth).max() <= noise[peaked]
    assert noise[1.0] < 1e-5 < 10 * noise[1.0] < noise[100.0]
    other = build(BertModel, TINY, seed=1)
    assert "one at a time" in encoding._differs(model, other, 0, "text-embeddings")


def test_lengths_are_a_seeds_own():
    found = {lengths_of(seed) for seed in range(30)}
    assert len(found) == 30 and LENGTHS in found
    assert all(list(n) == sorted(set(n)) and n[0] <= 4 and 200 <= n[-1] <= 240 for n in found)


def test_the_page_has_every_architecture_of_this_release():
    """Another release of transformers is one run of `python -m benchmarks families --write` away from its page."""
    text = DOCS.read_text()
    assert f"architecture of transformers {transformers.__version__} that" in text
    parts = text.split("## ")[-len(TASKS) :]
    for task, part in zip(TASKS, parts, strict=True):
        told = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines() if line.startswith("| ")][2:]
        assert told == [a.name + (f", {a.variant}" if a.variant else "") for a in architectures((task,))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_every_architecture_is_exact_or_refused(seed):
    lines = run_all(architectures(), seed, 2)
    wrong = [(line.architecture, line.variant, line.note) for line in lines if line.verdict in ("wrong", "failed")]
    assert not wrong
    assert sum(line.verdict == "exact" for line in lines) > 180
