"""Random Whisper checkpoints through the worker: the tokens and times that transformers' own generate finds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from benchmarks.chaos.speech import WINDOW_S, whisper
from serve_app.media.limits import SAMPLE_RATE
from serve_app.predict.speech.encoder import Encoder
from serve_app.predict.speech.greedy import PACKED_WIDTH, Greedy
from serve_app.predict.speech.segments import split
from serve_app.predict.speech.spectrum import Spectrum
from serve_app.wire.generate import Failed
from tests.media.files import bad_sounds
from tests.media.hostile import hostile_sounds
from tests.predict.conftest import call
from tests.variants import some


def noise(seconds: float, seed: int) -> np.ndarray:
    """Changing sound, so that windows differ."""
    rng = np.random.default_rng(seed)
    count = int(seconds * SAMPLE_RATE)
    loud = np.interp(np.arange(count), np.linspace(0, count, 20), rng.uniform(0, 9000, 20))
    return (rng.normal(0, 0.3, count).clip(-1, 1) * loud).astype(np.int16)


def wav(samples: np.ndarray) -> bytes:
    import wave
    from io import BytesIO

    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def theirs(model, folder: Path, samples: np.ndarray, **options) -> dict:
    extractor = tf.WhisperFeatureExtractor.from_pretrained(folder)
    floats = samples.astype(np.float32) / 32768
    long = len(samples) > WINDOW_S * SAMPLE_RATE
    padding = {"truncation": False, "padding": "longest"} if long else {}
    given = extractor(floats, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, **padding)
    return model.generate(
        given.input_features, attention_mask=given.attention_mask if long else None, return_timestamps=True,
        return_segments=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [0.4, 3.0, 3.7, 10.0])
def test_the_spectrum_is_transformers(tmp_path, seconds):
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    samples = noise(seconds, 1)
    padding = {"truncation": False, "padding": "longest"} if seconds > WINDOW_S else {}
    floats = samples.astype(np.float32) / 32768
    wanted = extractor(floats, sampling_rate=SAMPLE_RATE, return_tensors="pt", **padding).input_features[0]
    spectrum = Spectrum(extractor, samples)
    assert spectrum.frames == wanted.shape[-1]
    for start in range(0, spectrum.frames, 130):
        length = min(300, spectrum.frames - start)
        found = spectrum.window(start, 300)
        assert torch.allclose(found[:, :length], wanted[:, start : start + length], atol=2e-5)
        assert (found[:, length:] == 0).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
async def test_transcripts_are_transformers(work, tmp_path, seed):
    """Short and long sounds at once: batched over requests, and yet what each alone would give."""
    folder = tmp_path / "model"
    model = whisper(folder, seed)
    worker = work("automatic-speech-recognition", folder)
    sounds = [noise(seconds, seed * 10 + n) for n, seconds in enumerate((0.5, 2.9, 3.0, 9.9))]
    told = await asyncio.gather(*(worker.predict(call(wav(s), task="transcribe", language="de")) for s in sounds))
    windows = worker.stats().numbers
    assert windows["batches"] < windows["sequences"]
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    for samples, found in zip(sounds, told, strict=True):
        wanted = theirs(model, folder, samples, task="transcribe", language="de")
        segments = wanted["segments"][0]
        [heard] = map(json.loads, found.results)
        assert heard["text"] == tokenizer.decode(wanted["sequences"][0], skip_special_tokens=True)
        spoken = [s for s in segments if tokenizer.decode(s["tokens"], skip_special_tokens=True).strip()]
        assert [s["tokens"] for s in heard["segments"]] == [s["tokens"].tolist() for s in spoken]
        for ours, other in zip(heard["segments"], spoken, strict=True):
            assert (ours["start"], ours["end"]) == pytest.approx((float(other["start"]), float(other["end"])), abs=1e-3)
        assert found.units == {"audio_ms": -(-len(samples) * 1000 // SAMPLE_RATE)}
        assert heard["duration"] == pytest.approx(len(samples) / SAMPLE_RATE, abs=1e-3)


async def test_nothing_is_kept_for_gradients(work, tmp_path, monkeypatch):
    """The thread that computes asks torch for that itself."""
    folder, kept = tmp_path / "model", []
    whisper(folder, 1)
    worker = work("automatic-speech-recognition", folder)
    forward = worker._predictor.forward
    monkeypatch.setattr(
        worker._predictor, "forward", lambda items: (kept.append(torch.is_grad_enabled()), forward(items))[1]
    )
    await worker.predict(call(wav(noise(1.0, 1)), task="transcribe"))
    assert kept == [False]


@pytest.mark.slow
async def test_the_language_is_found_and_prompts_and_beams_are_heard(work, tmp_path):
    folder = tmp_path / "model"
    model = whisper(folder, 5)
    worker = work("automatic-speech-recognition", folder)
    samples = noise(2.0, 3)
    [heard] = map(json.loads, (await worker.predict(call(wav(samples), task="translate"))).results)
    extractor = tf.WhisperFeatureExtractor.from_pretrained(folder)
    given = extractor(samples.astype(np.float32) / 32768, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    names = {number: name[2:-2] for name, number in model.generation_config.lang_to_id.items()}
    assert heard["language"] == names[int(model.detect_language(given.input_features)[0])]
    assert 0 < heard["language_probability"] <= 1
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.get_prompt_ids("red", return_tensors="pt")
    for options, theirs_are in (({"prompt": "red"}, {"prompt_ids": prompt}), ({"beams": 3}, {"num_beams": 3})):
        asked = call(wav(samples), language="fr", **options)
        [heard] = map(json.loads, (await worker.predict(asked)).results)
        wanted = theirs(model, folder, samples, language="fr", task="transcribe", **theirs_are)
        said = tokenizer.decode(wanted["sequences"][0], skip_special_tokens=True)
        assert said.endswith(heard["text"]) and heard["text"]


async def test_who_leaves_ends_the_work_at_the_next_window(work, tmp_path):
    folder = tmp_path / "model"
    whisper(folder, 8)
    worker = work("automatic-speech-recognition", folder)
    forward, computed, leaves = worker._predictor.forward, [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def counted(items):
        computed.append(len(items))
        loop.call_soon_threadsafe(leaves.set)
        return forward(items)

    worker._predictor.forward = counted
    asking = asyncio.ensure_future(worker.predict(call(wav(noise(60.0, 5)), language="en")))
    await leaves.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    # The worker has all of its time for others: at most the window that was under way, and the one behind it.
    [heard] = map(json.loads, (await worker.predict(call(wav(noise(0.5, 6)), language="en"))).results)
    assert heard["duration"] == 0.5 and sum(computed) <= 3
    await asyncio.sleep(0.05)
    assert sum(computed) <= 3 and worker.stats().numbers["queued_calls"] == 0


@pytest.mark.parametrize("aligned", some([True, False], True))
async def test_words_have_times_within_their_segments(work, tmp_path, aligned):
    folder = tmp_path / "model"
    whisper(folder, 6, aligned=aligned)
    worker = work("automatic-speech-recognition", folder)
    [heard] = map(json.loads, (await worker.predict(call(wav(noise(7.0, 4)), words=True, language="en"))).results)
    plain = json.loads((await worker.predict(call(wav(noise(7.0, 4)), language="en"))).results[0])
    assert plain["text"] == heard["text"]
    assert heard["segments"]
    for segment in heard["segments"]:
        times = [time for word in segment["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times) and segment["start"] <= times[0] and times[-1] <= segment["end"] + 1e-3
        joined = "".join(word["word"] for word in segment["words"])
        assert joined == "".join(segment["text"].split())


async def test_what_a_model_can_not_do_and_bad_sounds_are_refused(work, tmp_path):
    folder = tmp_path / "model"
    whisper(folder, 7, multilingual=False)
    worker = work("automatic-speech-recognition", folder)
    for options in ({"task": "translate"}, {"language": "de"}):
        refused = await worker.predict(call(wav(noise(0.5, 1)), **options))
        assert isinstance(refused, Failed) and "English alone" in refused.error
    refused = await worker.predict(call(wav(noise(0.5, 1)), prompt="red <|endoftext|>"))
    assert isinstance(refused, Failed) and "control tokens" in refused.error
    assert json.loads((await worker.predict(call(wav(noise(0.5, 1)), language="en"))).results[0])["language"] == "en"
    told = await asyncio.gather(
        *(worker.predict(call(data)) for data in [*bad_sounds().values(), *hostile_sounds().values()])
    )
    assert all(isinstance(found, Failed) and found.error.startswith("audio: ") for found in told)


def test_windows_are_cut_where_the_paper_says():
    begin = 100
    # One segment without an end: all of the window.
    assert split([1, 2], begin, 300, 2) == split([1, 2], begin, 300, 2)
    parts, done = split([100, 1, 2, 125, 125, 3], begin, 300, 2)
    assert done == 50 and [(p.start, p.end, p.first, p.last) for p in parts] == [(0.0, 0.5, 0, 5)]
    parts, done = split([100, 1, 125, 125, 2, 140], begin, 300, 2)
    assert done == 300 and [(p.start, p.end) for p in parts] == [(0.0, 0.5), (0.5, 0.8)]
    parts, done = split([1, 2, 140], begin, 300, 2)
    assert done == 300 and parts[0].end == pytest.approx(0.8)


def test_what_the_short_loop_does_not_know_is_left_to_generate(tmp_path):
    model = whisper(tmp_path, 1)
    assert Greedy.takes(model)
    model.generation_config.repetition_penalty = 1.5
    assert not Greedy.takes(model)
    model = whisper(tmp_path, 1)
    model.generation_config.max_length = None
    assert not Greedy.takes(model)


@pytest.mark.parametrize("width", [32, PACKED_WIDTH])
def test_the_encoder_finds_what_transformers_does(tmp_path, width):
    model = whisper(tmp_path, 3, width=width)
    features = torch.randn(3, 16, 100 * WINDOW_S, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.get_encoder()(features).last_hidden_state
        assert Encoder.takes(model)
        found = Encoder(model)(features)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_encoder_of_another_kind_is_left_to_transformers(tmp_path):
    model = whisper(tmp_path, 3)
    model.config.activation_function = "relu"
    assert not Encoder.takes(model)
    assert not Encoder.takes(whisper(tmp_path, 3).half())


@pytest.mark.parametrize(
    "multilingual, width",
    some([(True, 32), (False, 32), (True, PACKED_WIDTH)], (True, 32), (True, PACKED_WIDTH), names=2),
)
async def test_the_short_loop_finds_what_generate_finds(work, tmp_path, multilingual, width):
    """Languages that are found and told, beside each other; probabilities and confidence as well."""
    folder = tmp_path / "model"
    whisper(folder, 7, multilingual=multilingual, width=width)
    sounds = [noise(seconds, n) for n, seconds in enumerate((0.7, 2.0, 2.9, 4.5))]
    told = []
    for short in (True, False):
        worker = work("automatic-speech-recognition", folder)
        if not short:
            worker._predictor._greedy = None
        options = [{}, {"language": "fr"} if multilingual else {}, {}, {}]
        answers = [worker.predict(call(wav(s), task="transcribe", **o)) for s, o in zip(sounds, options, strict=True)]
        told.append([json.loads(found.results[0]) for found in await asyncio.gather(*answers)])
    for ours, other in zip(*told, strict=True):
        assert [s["tokens"] for s in ours["segments"]] == [s["tokens"] for s in other["segments"]] != [[]]
        assert (ours["text"], ours["language"]) == (other["text"], other["language"])
        assert ours["language_probability"] == pytest.approx(other["language_probability"], abs=1e-4)
        for mine, theirs_ in zip(ours["segments"], other["segments"], strict=True):
            for name in ("avg_logprob", "no_speech_prob"):
                assert mine[name] == pytest.approx(theirs_[name], abs=1e-4)
