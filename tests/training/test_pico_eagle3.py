"""The shipped EAGLE-3 head: small, in the published layout, and worth its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from serve_app.distill.measure import count, eagle_engine
from serve_app.distill.prompts import prepare
from serve_app.models.load import load_causal_lm

ROOT = Path(__file__).parents[2]
HEAD = ROOT / "checkpoints" / "pico-eagle3"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_is_small_and_has_the_names_of_published_heads():
    assert sum(f.stat().st_size for f in HEAD.iterdir() if f.is_file()) < 3_000_000
    with safe_open(str(HEAD / "model.safetensors"), "pt") as stored:
        names = set(stored.keys())
    assert {"fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d"} <= names


def test_its_card_has_the_figures_and_the_command():
    card, figures = (HEAD / "README.md").read_text(), json.loads((HEAD / "figures.json").read_text())
    assert f"**{figures['length']:.2f} tokens**" in card and f"{figures['parameters']:,} parameters" in card
    assert "serve-app train-draft checkpoints/pico-instruct --method eagle3" in card
    assert "`checkpoints/pico-draft` has" in card


@pytest.mark.slow
def test_it_saves_steps_on_questions():
    target = ROOT / "checkpoints" / "pico-instruct"
    questions = json.loads((ROOT / "training" / "questions.json").read_text())["questions"][::8]
    items = [{"prompt": q["question"]} for q in questions]
    prompts = prepare(items, target, longest=500, vocab=6144, seed=0)
    engine = eagle_engine(load_causal_lm(target), HEAD, prompts.train, 64, 4)
    assert count(engine, prompts.train, 64).length > 2.0
