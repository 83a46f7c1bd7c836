"""Training adapters of a tiny model: what is learnt, the same after an interruption, as PEFT reads it, refused with a
remedy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from serve_app import cli
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.finetune.data import BadData, read_data
from serve_app.finetune.train import Options, train
from serve_app.text.tokenizer import Tokenizer
from tests import tiny

PICO = PROJECT_ROOT / "checkpoints" / "pico-instruct"
SMALL = {"rank": 2, "steps": 6, "batch_tokens": 300, "lr": 2e-2, "threads": 1, "held_out": 0.2}
TALKS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "Aye, aye!"}]}
    for n in range(20)
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", vocab_size=6144)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / name)
    return folder


def lines(path: Path, items: list) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    return lines(tmp_path_factory.mktemp("data") / "talks.jsonl", TALKS)


def run(model: Path, data: Path, out: Path, **options):
    told: list[str] = []
    return train(Options(str(model), str(data), str(out), **{**SMALL, **options}), model, told.append), told


@pytest.mark.slow
def test_what_is_learnt_shows_on_lines_that_were_not(model, talks, tmp_path):
    from peft import PeftModel

    found, told = run(model, talks, tmp_path / "out", steps=30)
    assert found.after.loss < found.before.loss - 1 and found.after.right > found.before.right
    assert any("min left" in line for line in told) and "can be uploaded" in told[-1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{found.after.loss:.3f}" in card and "train-lora tiny --data talks.jsonl --rank 2" in card
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny" and str(tmp_path) not in json.dumps(config)
    # PEFT takes it as it takes its own, and it says what it learnt.
    base = tiny.load_reference(model)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    tokenizer = Tokenizer(model)
    sample = read_data(talks, model, frozenset({2}), longest=100, held_out=0.2, seed=0).held_out[0]
    start = sample.learnt.index(True)
    said = tiny.reference_tokens(adapted, sample.ids[:start], len(sample.ids) - start)
    assert tokenizer.decode(said) == "Aye, aye!"


@pytest.mark.slow
def test_an_interrupted_run_makes_the_same_adapter(model, talks, tmp_path):
    whole, _ = run(model, talks, tmp_path / "whole")
    stopped, told = run(model, talks, tmp_path / "parts", stop_at=3)
    assert stopped is None and told[-1].startswith("stopped at step 3")
    assert not (tmp_path / "parts" / "adapter_config.json").exists()
    again, told = run(model, talks, tmp_path / "parts")
    assert "goes on from step 3" in told and again.after == whole.after and again.before == whole.before
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_text_is_learnt_whole_and_of_conversations_the_answers(model, tmp_path):
    tokenizer = Tokenizer(model)
    talk = [*TALKS[0]["messages"], {"role": "user", "content": "More"}, {"role": "assistant", "content": "No."}]
    data = lines(tmp_path / "d.jsonl", [{"messages": talk}] * 2 + [{"text": "def f(): pass"}] * 2)
    read = read_data(data, model, frozenset({2}), longest=100, held_out=0.1, seed=0)
    assert read.kinds == {"messages", "text"}
    parts = {tokenizer.decode([t for t, yes in zip(s.ids, s.learnt, strict=True) if yes]) for s in read.train}
    assert parts == {"Aye, aye!No.", "def f(): pass"}
    for sample in read.train:
        # Each answer ends with the token that ends the turn, and nothing behind it is learnt.
        assert sample.ids[-1] == 2 and sample.learnt[-1]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "0 lines can be learnt from"),
        ('{"messages": []}\n', "line 1: the conversation has no turn of the assistant"),
        ('{"text": "a b c"}\nnot json\n', "line 2 is no JSON"),
        ('{"prompt": "x"}\n', 'line 1 has neither "messages"'),
        ('{"messages": [{"content": "x"}]}\n', "line 1: 'role'"),
        (json.dumps({"text": "long " * 500}) + "\n", "1 are longer than 100 tokens.*--max-tokens"),
    ],
)
def test_a_file_that_cannot_be_learnt_from_is_refused_with_the_line(model, tmp_path, content, why):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(BadData, match=why):
        read_data(tmp_path / "d.jsonl", model, frozenset({2}), longest=100, held_out=0.1, seed=0)


def test_the_command_refuses_before_it_begins(model, talks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVE_APP_PORT", "9")

    def refused(*words: str) -> str:
        assert cli.main(["train-lora", *words]) == 2
        return capsys.readouterr().err

    told = ("--data", str(talks), "--out", str(tmp_path / "o"))
    assert "no model /nowhere" in refused("/nowhere", *told)
    assert "--rank 500" in refused(str(model), *told, "--rank", "500")
    assert "needs a model of the catalogue" in refused(str(model), *told, "--register", "x")
    assert "no server answers" in refused("@cf/pico/pico-instruct", *told, "--register", "x")
    assert "q_poj" in refused(str(model), *told, "--modules", "q_poj")
    assert "begun with another modules" in refused(str(model), *told, "--modules", "q_proj")
