"""How many tokens a sound becomes, by the rules of the models that hear: see `serve_app.text.media`.

A sound is cut into windows of what the encoder hears at once (half a minute), the last one filled up with silence.
Sources: `processing_voxtral.py`, `processing_qwen2_audio.py`, `processing_audioflamingo3.py` and `processing_glmasr.py`
of transformers 5.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from serve_app.text.media import MediaFile, MediaRule, Medium, NoMedia, read_json

# What sounds are decoded to (`serve_app.media.limits`), and what all encoders hear.
SAMPLE_RATE = 16_000
# Of one sound: hearing it takes a worker's memory.
MAX_SECONDS = 1800


@dataclass(slots=True, frozen=True)
class Sound(MediaFile):
    """``samples``: how many it has, at `SAMPLE_RATE`."""

    medium: ClassVar[Medium] = "audio"
    samples: int


@dataclass(slots=True, frozen=True)
class SoundRule(MediaRule):
    """The rule of one model. ``window``: samples that it hears at once."""

    window: int

    @property
    def most_samples(self) -> int:
        """Of the longest sound that the model takes."""
        return MAX_SECONDS * SAMPLE_RATE

    @abstractmethod
    def features(self, samples: int) -> int:
        """Of a sound of so many samples; none where there are too few."""

    def tokens_of(self, file: MediaFile) -> int:
        assert isinstance(file, Sound)
        return self.features(file.samples) if file.samples <= self.most_samples else 0

    def refusal(self, file: MediaFile) -> str:
        assert isinstance(file, Sound)
        if file.samples <= self.most_samples:
            return "A sound is too short for this model to hear anything; send a longer one."
        return f"A sound is longer than the {self.longest_s:g} seconds that this model hears; cut it."

    @property
    def longest_s(self) -> float:
        return self.most_samples / SAMPLE_RATE


@dataclass(slots=True, frozen=True)
class Windows(SoundRule):
    """Voxtral: each window has ``each`` tokens, what it was filled up with among them."""

    each: int

    def features(self, samples: int) -> int:
        return -(-samples // self.window) * self.each


@dataclass(slots=True, frozen=True)
class Pooled(SoundRule):
    """Qwen2-Audio and later: as many tokens are left as were heard: a half of the frames by a convolution, and of these
    one for ``merged`` of them. ``hop``: samples of a frame; ``most``: windows."""

    hop: int
    merged: int
    most: int

    @property
    def most_samples(self) -> int:
        return min(self.most * self.window, MAX_SECONDS * SAMPLE_RATE)

    def features(self, samples: int) -> int:
        frames = -(-samples // self.hop)
        return max(0, ((frames - 1) // 2 + 1 - self.merged) // self.merged + 1)


def read_sound_rule(folder: Path, names: dict[str, int]) -> SoundRule:
    """The rule of the model in ``folder``, whose control tokens have these ``names``. Raises
    :class:`~serve_app.text.media.NoMedia`."""
    config, processor = read_json(folder, "config.json"), read_json(folder, "processor_config.json")
    settings = processor.get("feature_extractor") or read_json(folder, "preprocessor_config.json")
    hears, family = config.get("audio_config"), config.get("model_type")
    if family not in ("voxtral", *_POOLED):
        raise NoMedia(f"the way of {family} with sounds is not supported; text alone is")
    if not isinstance(hears, dict) or not settings:
        raise NoMedia("it has no processor for them")
    token = config.get("audio_token_id", config.get("audio_token_index"))
    mark = next((name for name, index in names.items() if index == token), None)
    if mark is None or not isinstance(token, int):
        raise NoMedia(f"{token} is no control token of its tokenizer")
    try:
        if family == "voxtral":
            return Windows(mark, mark, token, _window(settings, hears), _each(hears))
        merged, longest = _POOLED[family]
        most = int(processor.get("max_audio_len", longest) // settings.get("chunk_length", 30)) if longest else 1
        return Pooled(mark, mark, token, _window(settings, hears), settings.get("hop_length", 160), merged, most)
    except (KeyError, TypeError) as error:
        raise NoMedia(f"its processor's configuration is of an unknown form ({error})") from None


# How many become one, and the seconds that the processor takes by default; 0: one window.
_POOLED = {"qwen2_audio": (2, 0), "audioflamingo3": (2, 600), "glmasr": (4, 655)}


def _window(settings: dict[str, Any], hears: dict[str, Any]) -> int:
    rate, hop = settings.get("sampling_rate", SAMPLE_RATE), settings.get("hop_length", 160)
    window = int(settings.get("chunk_length", 30) * rate)
    positions = hears.get("max_source_positions", hears.get("max_position_embeddings", 1500))
    # The first two convolutions of all these encoders halve the frames once.
    if rate != SAMPLE_RATE or window != 2 * positions * hop:
        raise NoMedia("its processor prepares windows that its encoder does not hear")
    return window


def _each(hears: dict[str, Any]) -> int:
    """Several moments side by side become one token, as wide as the projector takes them."""
    positions: int = hears.get("max_source_positions", 1500)
    return positions * hears.get("hidden_size", 1280) // hears.get("intermediate_size", 5120)
