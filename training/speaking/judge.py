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
from training.speaking.sentences import in_digits


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
    """Word error rates of what the model says and of the voice that it was trained with; and how many of their words
    are misunderstood in a sentence for each number in digits.
    """
    texts, voice = held_out(count), Voice()
    timers = [f"Set a timer for {number} minutes." for number in commands.NUMBERS]
    given = [*texts, *map(in_digits, timers)]
    sounds = {"speaker": said(folder, given), "espeak": [voice.say(text).samples for text in given]}
    figures: dict[str, float] = {}
    for name, made in sounds.items():
        spoken = [Spoken(*one) for one in zip([*texts, *timers], made, strict=True)]
        figures[name] = recogniser.score(recogniser.OUT, spoken[:count])
        words = sum(len(text.split()) for text in timers)
        figures[f"{name}_digits"] = round(recogniser.score(recogniser.OUT, spoken[count:]) * words)
    return figures
