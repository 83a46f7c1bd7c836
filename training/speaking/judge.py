"""How well pico-hearing understands what a speaker says of sentences that it has not been trained with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers as tf

from training.hearing import commands, recogniser
from training.hearing.recogniser import Spoken
from training.hearing.voice import Samples
from training.speaking.espeak import Voice


def held_out(count: int) -> list[str]:
    rng = Random("score")
    return [commands.make(rng, held_out=True) for _ in range(count)]


@torch.no_grad()
def said(folder: Path, texts: Iterable[str]) -> list[Samples]:
    """As the server says them."""
    model = tf.VitsModel.from_pretrained(folder, dtype=torch.float32).eval()
    words = tf.AutoTokenizer.from_pretrained(folder)
    sounds = (model(words(text, return_tensors="pt")["input_ids"]).waveform[0] for text in texts)
    return [(sound.clamp(-1, 1) * 32767).round().numpy().astype(np.int16) for sound in sounds]


def score(folder: Path, count: int) -> dict[str, float]:
    """Word error rates: of what the model says, and of the voice that it was trained with."""
    texts, voice = held_out(count), Voice()
    sounds = {"speaker": said(folder, texts), "espeak": [voice.say(text).samples for text in texts]}
    return {
        name: recogniser.score(recogniser.OUT, [Spoken(*one) for one in zip(texts, made, strict=True)])
        for name, made in sounds.items()
    }
