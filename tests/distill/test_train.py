"""Distilling on a tiny random model: better than chance, the same after an interruption, refused with a remedy."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from serve_app import cli
from serve_app.distill import memory
from serve_app.distill.answers import Batches, Sample, Teacher
from serve_app.distill.head import HeadInTraining
from serve_app.distill.train import Options, make_student, train
from serve_app.engine.speculation.eagle import HeadRows
from serve_app.engine.step import Capture, Scheduled, build_batch
from serve_app.models.heads.eagle import attach_head
from tests import tiny
from tests.variants import some

SMALL = {"steps": 40, "answer_tokens": 40, "batch_tokens": 256, "tokens": 3, "lr": 4e-3, "threads": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Few beginnings, so that a head has something to learn from a model that says nothing."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = random.Random(1)
    starts = [[rng.randrange(3, 256) for _ in range(6)] for _ in range(3)]
    lines = [{"ids": [rng.randrange(3, 256), *starts[i % 3]]} for i in range(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(target, prompts, out, method="eagle3", **options):
    lines: list[str] = []
    told = Options(str(target), method, str(out), str(prompts), **{**SMALL, **options})
    return train(told, target, lines.append), lines


@pytest.mark.parametrize("method", some(["eagle3", "model"]))
def test_what_is_trained_drafts_better_than_chance(method, target, prompts, tmp_path):
    before, _ = run(target, prompts, tmp_path / "fresh", method, steps=1, lr=1e-9)
    found, lines = run(
        target, prompts, tmp_path / "trained", method, steps=60, lr=8e-3, compare=str(tmp_path / "fresh")
    )
    assert found.length > before.length + 0.1 and found.length > 1.15
    assert found.prompts == 3 and any("answers 27/27" in line for line in lines)
    out = tmp_path / "trained"
    assert json.loads((out / "figures.json").read_text())["length"] == found.length
    card = (out / "README.md").read_text()
    assert f"{found.length:.2f} tokens" in card and f"--method {method}" in card and "--steps 60" in card
    assert f"`{tmp_path / 'fresh'}` has {before.length:.2f} tokens a step" in card
    assert (out / ".train" / ".gitignore").read_text() == "*\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["eagle3", "model"], "model"))
def test_an_interrupted_run_ends_as_an_undisturbed_one(method, target, prompts, tmp_path):
    whole, _ = run(target, prompts, tmp_path / "whole", method, steps=6)
    stopped, _ = run(target, prompts, tmp_path / "parts", method, steps=6, stop_at=3)
    assert stopped is None
    # Half of an answer's line, as a crash leaves it.
    answers = tmp_path / "parts" / ".train" / "answers.jsonl"
    answers.write_text(answers.read_text()[:-20])
    again, lines = run(target, prompts, tmp_path / "parts", method, steps=6)
    assert "goes on from step 3" in lines
    assert again == whole
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_in_training_a_head_computes_what_it_will_when_served(target, tmp_path):
    """The unrolled drafts of one slot are the chain that the served head drafts from it."""
    model = tiny.load(target)
    torch.manual_seed(0)
    sample = Sample([7, 9, *range(20, 40)], 2)
    options = Options(str(target), "eagle3", str(tmp_path), **SMALL)
    student = make_student(options, target, model, [Sample(list(range(256)), 1)] * 2)
    assert isinstance(student, HeadInTraining)
    student.save(tmp_path / "head", "x", torch.float32)
    lesson = Teacher(model, student.shape.layers, 64, 64).teach([sample])
    seen: list[torch.Tensor] = []
    student.norm.register_forward_hook(lambda module, args, out: seen.append(args[0].detach()))
    student(lesson, 3)
    head = attach_head(model, tmp_path / "head")
    kv = model.kv_shape.allocate(4, "cpu")
    request = tiny.make_request("x", sample.ids)
    request.blocks = [1, 2]
    with torch.inference_mode():
        batch = build_batch([Scheduled(request, 0, 21, 0)], kv)
        batch.capture = Capture(head.layers)
        model.forward(batch)
        slot = 10
        rows = HeadRows(request, 0, slot + 1, 1, sample.ids[1 : slot + 2], request.blocks)
        _, hidden = head(build_batch([rows], kv), head.fuse(batch.capture.states[: slot + 1]))
        chain = [hidden]
        for step in (1, 2):
            rows = HeadRows(request, slot + step, 1, 1, [sample.ids[slot + 1 + step]], request.blocks)
            _, hidden = head(build_batch([rows], kv), hidden)
            chain.append(hidden)
    # Slots 0 .. 18 have a teacher's row at step 0 and one fewer each step; the prompt's two tokens come first.
    for step, hidden in enumerate(chain):
        torch.testing.assert_close(seen[step][slot], hidden[0], rtol=1e-3, atol=1e-3)


def test_lessons_are_the_models_own_logits(target):
    model, reference = tiny.load(target), tiny.load_reference(target)
    samples = [Sample(list(range(5, 45)), 7), Sample([9, 8, 7, 6], 1)]
    lesson = Teacher(model, (0, 2), 64, 64).teach(samples)
    with torch.inference_mode():
        for row, sample in enumerate(samples):
            ids = torch.tensor([sample.ids])
            out = reference(ids, output_hidden_states=True)
            rows = lesson.answers[row].nonzero()[:, 0]
            assert rows.tolist() == list(range(sample.prompt - 1, len(sample.ids) - 1))
            mine = lesson.logits[int(lesson.answers[:row].sum()) :][: len(rows)]
            torch.testing.assert_close(mine, out.logits[0, rows], rtol=1e-3, atol=1e-3)
            states = torch.stack([out.hidden_states[i][0] for i in (0, 2)], 1)[: len(sample.ids) - 1]
            torch.testing.assert_close(lesson.states[row, : len(states)], states, rtol=1e-3, atol=1e-3)


def test_every_epoch_has_every_sample_once():
    samples = [Sample([0] * (1 + i % 50), 1) for i in range(700)]
    batches = Batches(samples, 300, seed=3)
    count = batches.per_epoch
    for epoch in range(2):
        seen = [s for i in range(count) for s in batches.step(epoch * count + i)]
        assert sorted(map(id, seen)) == sorted(map(id, samples))
    again = Batches(samples, 300, seed=3)
    assert again.step(count + 2) == batches.step(count + 2) and again.step(0) == batches.step(0)
    assert all(max(len(s.ids) for s in batches.step(i)) * len(batches.step(i)) <= 300 for i in range(count))


# --- refused ------------------------------------------------------------------------------------------


def refused(capsys, *arguments) -> str:
    assert cli.main(["train-draft", *map(str, arguments)]) == 2
    # transformers' progress bar comes before.
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("serve-app: ")
    return said


def test_a_wrong_directory(capsys, tmp_path):
    options = ("--method", "eagle3", "--out", tmp_path / "out")
    assert "there is no model" in refused(capsys, tmp_path / "nowhere", *options)
    assert "no config.json" in refused(capsys, tmp_path, *options)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "never opened" in refused(capsys, tmp_path, *options)


@pytest.mark.slow
def test_an_unknown_model_or_one_that_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    for model, reason in (("@cf/no/such", "no such model"), ("@cf/pico/pico-reranker", "have no draft")):
        assert cli.main(["train-draft", model, "--method", "model", "--out", str(tmp_path / "o")]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_other_options_in_the_same_directory(capsys, target, prompts, tmp_path):
    run(target, prompts, tmp_path / "out", steps=4, stop_at=1)
    options = ("--method", "eagle3", "--prompts", prompts, "--steps", 9)
    assert "begun with another" in refused(capsys, target, *options, "--out", tmp_path / "out")
    assert "own directory" in refused(capsys, target, *options, "--out", target)
    other = tiny.write_checkpoint(tmp_path / "other", "llama")
    assert "holds a model already" in refused(capsys, target, *options, "--out", other)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 of 0 prompts"),
        ('{"ids": [1]}\n' * 3, "give at least 4"),
        ('{"ids": [1]\n', "line 1 begins like JSON"),
        ('{"ids": [1]}\n{"text": "x"}\n', "line 2 has none"),
        ("What is a text for a model without a tokenizer?\n", "no tokenizer.json"),
    ],
)
def test_bad_prompts(text, reason, capsys, target, tmp_path):
    (tmp_path / "prompts").write_text(text)
    options = ("--method", "eagle3", "--out", tmp_path / "out", "--prompts", tmp_path / "prompts")
    assert reason in refused(capsys, target, *options)


def test_too_little_memory(capsys, target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 20)
    options = ("--method", "eagle3", "--out", tmp_path / "out", "--prompts", prompts, "--answer-tokens", 8)
    assert "lower --batch-tokens" in refused(capsys, target, *options)


def test_layers_that_the_target_does_not_have(capsys, target, prompts, tmp_path):
    options = ("--out", tmp_path / "out", "--prompts", prompts, "--answer-tokens", 8, "--capture", "1,2,3")
    assert "three layers from 0 to 2" in refused(capsys, target, "--method", "eagle3", *options)
