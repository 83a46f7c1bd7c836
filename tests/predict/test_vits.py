"""Random VITS checkpoints through the worker: the samples that transformers makes with the same seed."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from serve_app.wire.generate import Failed
from tests.predict.conftest import call

LETTERS = " abcdefghijklmnopqrstuvwxyz'"


def vits(folder: Path, *, speakers: int = 1, stochastic: bool = True) -> tuple[tf.VitsModel, tf.VitsTokenizer]:
    torch.manual_seed(3)
    config = tf.VitsConfig(
        vocab_size=len(LETTERS) + 1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24,
        flow_size=8, spectrogram_bins=17, prior_encoder_num_flows=2, prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=2, duration_predictor_filter_channels=8,
        duration_predictor_flow_bins=4, upsample_initial_channel=16, upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
        num_speakers=speakers, speaker_embedding_size=4 if speakers > 1 else 0,
        use_stochastic_duration_prediction=stochastic,
        sampling_rate=16_000, noise_scale=0.7,
    )  # fmt: skip
    model = tf.VitsModel(config).eval()
    model.save_pretrained(folder)
    (folder / "letters.json").write_text(json.dumps({letter: i for i, letter in enumerate(["_", *LETTERS])}))
    tokenizer = tf.VitsTokenizer(str(folder / "letters.json"), pad_token="_", unk_token="_", phonemize=False)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def samples(found, number: int = 0) -> np.ndarray:
    return np.frombuffer(base64.b64decode(json.loads(found.results[number])["samples"]), "<i2")


@pytest.mark.parametrize(("speakers", "stochastic"), [(1, True), (3, False)])
async def test_speech_is_transformers(work, tmp_path, speakers, stochastic):
    model, tokenizer = vits(tmp_path / "model", speakers=speakers, stochastic=stochastic)
    worker = work("text-to-speech", tmp_path / "model")
    texts = ["hello world", "Say THIS, twice", "a", "it's late"]
    voice = {"voice": "2"} if speakers > 1 else {"voice": "alloy"}
    told = await asyncio.gather(
        *(worker.predict(call(text.encode(), seed=seed, speed=1.5, **voice)) for seed, text in enumerate(texts))
    )
    for seed, (text, found) in enumerate(zip(texts, told, strict=True)):
        torch.manual_seed(seed)
        with torch.no_grad():
            given = tokenizer(text, return_tensors="pt")["input_ids"]
            wave = model(given, speaker_id=2 if speakers > 1 else None, speaking_rate=1.5).waveform[0]
        wanted = (wave.clamp(-1, 1) * 32767).round().numpy().astype(np.int16)
        assert len(samples(found)) == len(wanted) > 0
        assert np.abs(samples(found).astype(int) - wanted).max() <= 1
        assert found.units == {"audio_ms": -(-len(wanted) * 1000 // 16_000)}
        assert json.loads(found.results[0])["rate"] == 16_000
    first, again, other = [
        samples(await worker.predict(call(b"hello world", seed=seed, **voice))) for seed in (5, 5, 6)
    ]
    assert np.array_equal(first, again) and not np.array_equal(first, other[: len(first)])


async def test_what_cannot_be_said(work, tmp_path):
    vits(tmp_path / "model", speakers=3)
    worker = work("text-to-speech", tmp_path / "model")
    nothing = await worker.predict(call("12 Ж".encode()))
    assert len(samples(nothing)) == 0 and nothing.units == {"audio_ms": 0}
    for voice in ("3", "alloy", "-1"):
        refused = await worker.predict(call(b"hello", voice=voice))
        assert isinstance(refused, Failed) and "voices 0 to 2" in refused.error


def test_models_that_read_phonemes_are_refused(work, tmp_path):
    _, tokenizer = vits(tmp_path / "model")
    tokenizer.phonemize = True
    tokenizer.init_kwargs["phonemize"] = True
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="phonemizer"):
        work("text-to-speech", tmp_path / "model")
