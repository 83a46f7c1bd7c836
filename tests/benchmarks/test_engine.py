"""The engine's benchmarks with the smallest models, and with engines that answer wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from benchmarks.engine import checkpoint, encoder, engine, kernels, moe, perplexity, prefill, structured
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import BUILT_IN, load_record
from serve_app.catalog.weights import resolve
from serve_app.config import load_settings
from serve_app.engine.engine import Engine

PICO = CHECKPOINTS / "pico-instruct"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert checkpoint.main([str(folder), "tiny"]) == 0
    assert torch.get_default_dtype() == torch.float32  # what other benchmarks and tests go by
    return folder


def figures(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("more", [["--no-transformers"], pytest.param([], marks=pytest.mark.slow)])
def test_engine(model, capsys, more):
    few = ["--batch", "2", "--rounds", "1", "--new", "6", "--no-mixed", "--threads", "1", "--json"]
    assert engine.main([str(model), *few, *more]) == 0
    found = figures(capsys)["workloads"]["batch 2"]
    assert found["tokens_per_s"]["ours"] > 0
    assert more or found["ratio"]["transformers"] > 0


class Short:
    """A side that forgets a token of every answer."""

    name, info = "ours", {"weight_bytes": 1, "plain_bytes": 1, "kv_token_bytes": 1, "expert_bytes": 0}

    def run(self, prompts, new, salt):
        return {"tokens": [[1] * (n - 1) for n in new], "seconds": 1.0, "wall_s": 1.0, "cpu_s": 1.0}


def test_an_engine_whose_answers_are_short(capsys):
    with pytest.raises(SystemExit, match="no figures(?s:.)*ours, batch 1, lengths"):
        engine.measure([Short()], 1, engine.workloads([1], mixed=False), lambda: 1.0)
    assert capsys.readouterr().out == ""


def test_an_engine_that_says_something_else():
    checks, known = Checks(), {}
    engine.compare_tokens(checks, "transformers, batch 4", [[1, 2]] * 4, known)
    engine.compare_tokens(checks, "ours, batch 4", [[1, 3], [1, 2], [1, 2], [9, 2]], known)
    engine.compare_tokens(checks, "ours, batch 4", [[1, 3], [1, 2], [1, 2], [9, 2]], known)
    checks.require()
    engine.compare_tokens(checks, "ours, batch 4", [[1, 3], [1, 2], [1, 2], [1, 2]], known)
    engine.compare_tokens(checks, "vllm, batch 4", [[9, 2]] * 4, known)
    with pytest.raises(SystemExit, match="another round(?s:.)*0 % of first tokens are those of transformers"):
        checks.require()


def test_kernels(capsys, monkeypatch):
    assert kernels.main(["--quick", "--threads", "1", "--json"]) == 0
    assert all(row["ratio"] > 0 for row in figures(capsys)["rows"])
    monkeypatch.setattr(kernels, "paged_attention", lambda q, *_, **__: q)
    with pytest.raises(SystemExit, match="no figures(?s:.)*ours: .* away from sdpa"):
        kernels.main(["--quick", "--threads", "1"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_perplexity(tmp_path, capsys, monkeypatch):
    text = tmp_path / "text"
    text.write_text("Return an iterator over the items of the sequence. " * 5)
    few = [str(PICO), "--text", str(text), "--quantization", "none,int8", "--tokens", "40", "--rounds", "1"]
    assert perplexity.main([*few, "--json"]) == 0
    assert 0.9 < figures(capsys)["variants"]["int8"]["perplexity_ratio"] < 1.2
    monkeypatch.setattr(perplexity, "perplexity", lambda *_: float("nan"))
    with pytest.raises(SystemExit, match="no figures(?s:.)*perplexity of none: nan"):
        perplexity.main(few)
    assert capsys.readouterr().out == ""


def test_encoder(capsys):
    checks = Checks()
    right = np.eye(2, 4, dtype=np.float32)
    encoder.compare(checks, "ours", right, right)
    assert checks.require() == 3
    encoder.compare(checks, "other", right[::-1], right)
    encoder.compare(checks, "long", 2 * right, right)
    with pytest.raises(SystemExit, match="no figures(?s:.)*a vector of other(?s:.)*a vector of long"):
        checks.require()


@pytest.mark.slow
def test_encoder_of_minilm(capsys):
    record = load_record(BUILT_IN / "all-minilm-l6-v2.yaml")
    try:
        minilm = resolve(record.weights, load_settings().home)
    except CatalogError as error:
        pytest.skip(f"the weights can't be had here: {error}")
    assert encoder.main([str(minilm), "--sentences", "4", "--rounds", "1", "--threads", "1", "--json"]) == 0
    found = figures(capsys)
    assert found["sentences_per_s"]["ours"] > 0 and found["share_of_products"]["ours"] > 0


@pytest.mark.slow
def test_structured(capsys, monkeypatch):
    monkeypatch.setattr(structured, "QUESTIONS", structured.QUESTIONS[2:3])
    monkeypatch.setattr(structured, "BATCH", 2)
    assert structured.main(["--rounds", "1", "--new", "17", "--json"]) == 0
    found = figures(capsys)
    assert found["calls"]["forced"]["fewer_steps"] > 1 and "cost_percent" in found["throughput"]
    step = Engine.step

    def other(self: Engine) -> list:
        outputs = step(self)
        if self.speculation is not None:
            for output in outputs:
                output.token_ids = [token + 1 for token in output.token_ids]
        return outputs

    monkeypatch.setattr(Engine, "step", other)
    with pytest.raises(SystemExit, match="no figures(?s:.)*forced calls, forced"):
        structured.main(["--rounds", "1", "--parts", "calls"])
    assert capsys.readouterr().out == ""


def test_what_obeys_a_schema():
    schema = {"properties": {"name": {"type": "string"}, "score": {"type": "number"}}}
    assert structured.obeys('{"name": "a", "score": 1.5}', schema)
    for wrong in ('{"name": "a"}', '{"name": "a", "score": "b"}', '{"name": "a", "sc'):
        assert not structured.obeys(wrong, schema)


@pytest.mark.slow
def test_mixtures(tmp_path, capsys):
    few = ["--sizes", "tiny", "--batch", "2", "--rounds", "1", "--new", "4", "--threads", "1", "--json"]
    assert moe.main([*few, "--work", str(tmp_path)]) == 0
    found = figures(capsys)["tiny"]["workloads"]["batch 2"]
    assert found["tokens_per_s"]["ours"] > 0
    assert found["roofline_share"] == 0 or 0 < found["experts_share"] <= 1


def test_what_a_decode_step_of_a_mixture_needs():
    """In two steps: 30 bytes of all 100 are no experts', of the others 50 were chosen; three tokens were read."""
    run = {"decode_steps": 2, "expert_bytes_read": 50, "kv_tokens_read": 3}
    info = {"weight_bytes": 100, "expert_bytes": 70, "kv_token_bytes": 4}
    assert engine.bytes_needed(run, info, 100) == 2 * 30 + 50 + 3 * 4
    assert engine.bytes_needed(run, info, 200) == 2 * (2 * 30 + 50) + 3 * 4


def test_prompts_without_llama(tmp_path, capsys):
    absent = tmp_path / "python"
    absent.write_text("#!/bin/sh\necho No module named llama_cpp >&2\nexit 1\n")
    absent.chmod(0o755)
    few = ["--sizes", "tiny", "--work", str(tmp_path), "--batch", "", "--peers", "llama.cpp"]
    assert moe.main([*few, "--llama", str(absent), "--json"]) == 0
    said = capsys.readouterr()
    assert "llama.cpp is left out: No module named llama_cpp" in said.err
    assert json.loads(said.out.splitlines()[-1]) == {"tiny": {}}


class Answering:
    """A side that answers each prompt with one token."""

    def __init__(self, name: str, token: int) -> None:
        self.name, self.token = name, token

    def run(self, prompts, new, salt):
        return {"tokens": [[self.token]] * len(prompts), "seconds": 0.5, "wall_s": 1.0, "cpu_s": 1.0}


def test_prompts_beside_another_engine(capsys):
    sides = [Answering("ours", 7), Answering("llama.cpp", 7)]
    found = prefill.measure(sides, [64], 2, compared=True)["prompt 64"]
    assert found["tokens_per_s"] == {"ours": 128.0, "llama.cpp": 128.0} and found["ratio"] == 1
    with pytest.raises(SystemExit, match="no figures(?s:.)*0 % of first tokens are ours"):
        prefill.measure([sides[0], Answering("llama.cpp", 8)], [64], 1, compared=True)
    assert capsys.readouterr().out == ""
    assert torch.get_default_dtype() == torch.float32
