"""Tiny random checkpoints of families that hear, with tokenizer, template and processor, and what transformers makes of
sounds with them."""

from __future__ import annotations

import json
import wave
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3EncoderConfig,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    GlmAsrConfig,
    GlmAsrEncoderConfig,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    VoxtralConfig,
    VoxtralEncoderConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from serve_app.models.loading.miniature import randomise
from serve_app.text.sounds import Sound
from tests.sight import OWN, TEXT, write_tokenizer

MARKS = ["[BEGIN_AUDIO]", "[AUDIO]", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<sound>"]
FAMILIES = ("voxtral", "qwen2_audio", "audioflamingo3", "glmasr")
# What each template writes for a sound, and which of the marks is its token.
MARK = {
    "voxtral": ("[BEGIN_AUDIO][AUDIO]", 1),
    "qwen2_audio": ("<|audio_bos|><|AUDIO|><|audio_eos|>", 3),
    "audioflamingo3": ("<sound>", 5),
    "glmasr": ("<|audio_bos|><|AUDIO|><|audio_eos|>", 3),
}
CLASSES: dict[str, Any] = {
    "voxtral": VoxtralForConditionalGeneration,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "audioflamingo3": AudioFlamingo3ForConditionalGeneration,
    "glmasr": GlmAsrForConditionalGeneration,
}
PROCESSORS: dict[str, Any] = {
    "qwen2_audio": Qwen2AudioProcessor,
    "audioflamingo3": AudioFlamingo3Processor,
    "glmasr": GlmAsrProcessor,
}
RATE = 16_000
# Seconds of a window; one of GLM's has to have a multiple of eight frames.
WINDOW = {"voxtral": 1, "qwen2_audio": 1, "audioflamingo3": 1, "glmasr": 2}
# Tokens of a whole window.
EACH = 25


def write(path: Path, family: str, seed: int = 0) -> Path:
    """A random float32 checkpoint of ``family`` in ``path``."""
    torch.manual_seed(seed)
    ends = {n: TEXT[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    hears: dict[str, Any] = {
        "num_mel_bins": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_source_positions": 50 * WINDOW[family],
    }  # fmt: skip
    mark, token = MARK[family]
    ends["audio_token_id"] = OWN + token
    if family == "voxtral":
        encoder: Any = VoxtralEncoderConfig(**hears, vocab_size=64)
        config: Any = VoxtralConfig(audio_config=encoder, text_config=LlamaConfig(**TEXT), **ends)
    elif family == "glmasr":
        hears |= {"max_position_embeddings": hears.pop("max_source_positions"), "intermediate_size": 128}
        encoder = GlmAsrEncoderConfig(**hears)
        config = GlmAsrConfig(audio_config=encoder, text_config=LlamaConfig(**TEXT), **ends)
    else:
        text = Qwen2Config(**{name: value for name, value in TEXT.items() if name != "head_dim"})
        if family == "audioflamingo3":
            config = AudioFlamingo3Config(audio_config=AudioFlamingo3EncoderConfig(**hears), text_config=text, **ends)
        else:
            config = Qwen2AudioConfig(audio_config=Qwen2AudioEncoderConfig(**hears), text_config=text, **ends)
    model: Any = CLASSES[family](config)
    randomise(model)
    model.save_pretrained(path)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW[family])
    (path / "preprocessor_config.json").write_text(json.dumps(extractor.to_dict(), default=str))
    write_tokenizer(path, mark, MARKS)
    return path


def processor(path: Path) -> Any:
    """transformers' own of a folder; Voxtral's needs mistral-common."""
    family = json.loads((path / "config.json").read_text())["model_type"]
    fast = PreTrainedTokenizerFast.from_pretrained(path)
    return PROCESSORS[family](
        WhisperFeatureExtractor.from_pretrained(path), fast, fast.chat_template, audio_token=MARKS[MARK[family][1]]
    )


def sound(seconds: float, seed: int = 0) -> bytes:
    """A WAV of tones and noise, which are not all alike to an encoder."""
    generator = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    heard = generator.normal(0, 0.05, len(times))
    for begin in np.arange(0, seconds, 0.2):
        pitch = generator.uniform(100, 4000)
        heard += np.where((times >= begin) & (times < begin + 0.15), 0.4 * np.sin(2 * np.pi * pitch * times), 0)
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(heard, -1, 1) * 30_000).astype("<i2").tobytes())
    return out.getvalue()


def listened_to(seconds: float, seed: int = 0) -> Sound:
    file = sound(seconds, seed)
    return Sound(file, sha256(file).digest(), round(seconds * RATE))


def files(family: str) -> dict[str, Sound]:
    """Of several lengths, by name."""
    lengths = {"a": 0.71, "b": 1.0, "c": 0.99 if family == "qwen2_audio" else 2.4, "d": 0.08, "e": 0.333}
    return {name: listened_to(length, seed) for seed, (name, length) in enumerate(lengths.items())}


def another(family: str, seed: int) -> Sound:
    """As many places as the one named b has."""
    return listened_to(1.0, seed)


def samples_of(file: bytes) -> npt.NDArray[np.float32]:
    with wave.open(BytesIO(file)) as told:
        return np.frombuffer(told.readframes(told.getnframes()), "<i2").astype(np.float32) / 32768


class Truth:
    """transformers' own way from files and token ids to an answer."""

    def __init__(self, path: Path) -> None:
        family = json.loads((path / "config.json").read_text())["model_type"]
        self.model: Any = CLASSES[family].from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(path)
        self.processor = None if family == "voxtral" else processor(path)

    def heard(self, files: list[bytes]) -> dict[str, Any]:
        """What the processor makes of the sounds of one prompt."""
        sounds = [samples_of(file) for file in files]
        if self.processor is not None:
            asked = {"sampling_rate": RATE, "return_attention_mask": True, "return_tensors": "pt"}
            found, _ = self.processor._process_audio(sounds, **asked)
            return {name: value for name, value in found.items() if name != "num_audio_tokens"}
        own = SimpleNamespace(feature_extractor=self.extractor)
        kept = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": self.extractor.n_samples}
        frames = kept.pop("max_source_positions") * self.extractor.n_samples // 480_000
        return {"input_features": VoxtralProcessor._retrieve_input_features(own, sounds, frames, **kept)}

    def __call__(self, ids: list[int], files: list[bytes], count: int) -> list[int]:
        """The first ``count`` tokens of the answer, greedily."""
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
                eos_token_id=None, **(self.heard(files) if files else {}),
            )  # fmt: skip
        return out[0, len(ids) :].tolist()
