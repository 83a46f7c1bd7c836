"""pico-speaker: its files, the letters' times that it is taught, and whether it is understood."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
import transformers as tf
from safetensors import safe_open

from training.cards import parameters
from training.hearing import recogniser
from training.speaking import judge, sentences
from training.speaking.espeak import PHONEME, WORD, _Mark, framed, letter_ends
from training.speaking.speaker import LETTERS, Speaker

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "checkpoints" / "pico-speaker"


def test_the_checkpoint_is_complete_and_small():
    model, told = tf.VitsModel.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert (model.config.sampling_rate, model.config.noise_scale, model.config.dtype) == (16_000, 0.0, torch.float32)
    with safe_open(str(FOLDER / "model.safetensors"), "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5 << 20
    assert f"{parameters(FOLDER):,} parameters" in (FOLDER / "README.md").read_text()
    assert json.loads((FOLDER / "vocab.json").read_text()) == {letter: n for n, letter in enumerate(LETTERS)}


def test_it_has_a_letter_for_all_that_it_is_taught():
    rng = Random(3)
    assert set("".join(sentences.make(rng) for _ in range(500)).lower()) <= set(LETTERS)
    assert [sentences.spelled(number) for number in (7, 30, 99)] == ["seven", "thirty", "ninety-nine"]


def test_letters_share_the_phonemes_of_their_word():
    marks = [
        _Mark(WORD, 0, 0, 2, ""), _Mark(PHONEME, 10, 0, 0, "n"), _Mark(PHONEME, 100, 0, 0, "oU"),
        _Mark(PHONEME, 300, 0, 0, "_:"), _Mark(WORD, 350, 0, 0, ""), _Mark(WORD, 400, 4, 4, ""),
        _Mark(PHONEME, 400, 4, 0, "_"), _Mark(PHONEME, 420, 4, 0, "D"), _Mark(PHONEME, 500, 4, 0, "e@"),
        _Mark(PHONEME, 700, 4, 0, "_"),
    ]  # fmt: skip
    ends = letter_ends("No, ther.", marks, 720)
    assert ends == pytest.approx([100, 300, 350, 400, 450, 500, 600, 700, 720])
    assert framed([0.2, 0.4, 3.6, 3.7, 9.0]) == [1, 1, 2, 1, 4]


def test_it_is_trained_as_transformers_says():
    """With the durations that the model itself predicts the latents are those of its own forward."""
    speaker = Speaker().eval()
    speaker.vits = tf.VitsModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = torch.tensor([[LETTERS.index(char) for char in "turn on the light"]])
    with torch.no_grad():
        wanted = speaker.vits(ids)
        mask = torch.ones(ids.shape)
        _, _, logarithms = speaker.latents(ids, mask, torch.ones_like(ids))
        found, there, _ = speaker.latents(ids, mask, logarithms.exp().ceil().long())
        said = speaker.vits.decoder(found)[:, 0]
    assert there.all() and torch.allclose(found, wanted.spectrogram, atol=1e-5)
    assert torch.allclose(said, wanted.waveform, atol=1e-5)


@pytest.mark.slow  # says and hears sixty sentences
def test_held_out_commands_are_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    texts = judge.held_out(60)
    spoken = [recogniser.Spoken(*one) for one in zip(texts, judge.said(FOLDER, texts), strict=True)]
    assert recogniser.score(recogniser.OUT, spoken) < 0.1
