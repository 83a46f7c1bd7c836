"""Sounds in prompts: as many tokens as transformers' processors make, in places that nobody's text can fake."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from serve_app.api.errors import ContextTooLong, InvalidInput
from serve_app.api.types import GenerateRequest
from serve_app.sampling_params import SamplingParams
from serve_app.text.media import NoMedia
from serve_app.text.prompt import read_prompt, with_files
from serve_app.text.sounds import MAX_SECONDS, SAMPLE_RATE, Pooled, Sound, Windows
from serve_app.text.tokenizer import Tokenizer
from tests import hearing

LENGTHS = [961, 1120, 1281, 1600, 1601, 3199, 5000, 7999, 8000, 15_999, 16_000]


@pytest.fixture(scope="module", params=hearing.FAMILIES)
def folder(request, tmp_path_factory):
    """A folder without weights: what a gateway has."""
    path = hearing.write(tmp_path_factory.mktemp("model") / request.param, request.param)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def asked(*parts: str | int, **fields: Any) -> GenerateRequest:
    """One message of the user; numbers are sounds of so many samples."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "audio"} for p in parts]
    files = [Sound(b"", b"%d" % p, p) for p in parts if not isinstance(p, str)]
    return GenerateRequest(
        model="", messages=with_files([{"role": "user", "content": content}], files), prompt=None, raw=False,
        sampling=SamplingParams(max_tokens=8), **fields,
    )  # fmt: skip


def test_the_number_of_tokens_is_what_the_processor_makes(folder, tokenizer):
    """Voxtral's own is mistral-common's, which is not installed: a window of half a minute has 375."""
    own = None if folder.name == "voxtral" else hearing.processor(folder)
    asked_for = {"sampling_rate": hearing.RATE, "return_attention_mask": True, "return_tensors": "pt"}
    window = hearing.WINDOW[folder.name] * hearing.RATE
    longer = [] if folder.name == "qwen2_audio" else [window + 1, window + 5000, 2 * window, 3 * window - 1]
    for samples in [*LENGTHS, *longer]:
        if own is None:
            wanted = -(-samples // window) * hearing.EACH
        else:
            told, _ = own._process_audio([np.zeros(samples, np.float32)], **asked_for)
            wanted = int(told["num_audio_tokens"][0])
        found = read_prompt(tokenizer, asked("before ", samples, " behind"))
        [placed] = found.media
        assert sum(count for _, count in placed.places) == wanted == (found.ids == tokenizer.sounds.token).sum()
    assert Windows("", "", 0, 480_000, 375).features(480_001) == 750
    assert Pooled("", "", 0, 480_000, 160, 2, 1).features(480_000) == 750


def test_prompts_are_those_of_the_models_own_processor(folder, tokenizer):
    if folder.name == "voxtral":
        pytest.skip("its processor needs mistral-common")
    processor = hearing.processor(folder)
    # Some of these take one sound in a prompt.
    parts = ["Is ", 9000, " like ", 16_000, 1700, " or not?"] if folder.name == "qwen2_audio" else ["Is ", 9000, "?"]
    sounds = [np.zeros(part, np.float32) for part in parts if not isinstance(part, str)]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "audio"} for p in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(audio=sounds, text=[text], add_special_tokens=False)["input_ids"][0]
    assert read_prompt(tokenizer, asked(*parts)).ids.tolist() == list(theirs)


def test_the_template_that_comes_with_qwen_shows_sounds(tmp_path):
    """It tells a sound by a field of the part, where another one tells it by its type."""
    path = hearing.write(tmp_path / "qwen2_audio", "qwen2_audio")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if 'audio' in c or 'audio_url' in c %}Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
        "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(path)
    found = read_prompt(tokenizer, asked("a", 16_000, "b"))
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert text == f"aAudio: <|audio_bos|>{'<|AUDIO|>' * 25}<|audio_eos|>\nb"


def test_text_that_spells_a_mark_is_text(tokenizer):
    mark = tokenizer.sounds.mark
    found = read_prompt(tokenizer, asked(f"{mark} and", 16_000, f"{mark[:3]}", f"{mark[3:]}"))
    assert (found.ids == tokenizer.sounds.token).sum() == tokenizer.sounds.features(16_000) and len(found.media) == 1
    assert mark in tokenizer.decode(found.ids, skip_special_tokens=True)


def test_what_cannot_be_is_refused(folder, tokenizer):
    seconds = {"voxtral": MAX_SECONDS, "qwen2_audio": 1, "audioflamingo3": 600, "glmasr": 654}[folder.name]
    with pytest.raises(InvalidInput, match=rf"longer than the {seconds} seconds that this model hears; cut it"):
        read_prompt(tokenizer, asked("x", seconds * SAMPLE_RATE + 1))
    if folder.name != "voxtral":
        with pytest.raises(InvalidInput, match="too short for this model"):
            read_prompt(tokenizer, asked("x", 320))
    with pytest.raises(ContextTooLong):
        read_prompt(tokenizer, asked("x", *[16_000] * 10), context_window=100)
    with pytest.raises(InvalidInput, match="can't be cut"):
        read_prompt(tokenizer, asked("x", 16_000, keep_tokens=5))


@pytest.mark.parametrize(("name", "change", "why"), [
    ("config.json", {"model_type": "granite_speech"}, "granite_speech with sounds is not supported"),
    ("config.json", {"audio_config": None}, "no processor"),
    ("config.json", {"audio_token_id": 4000, "audio_token_index": 4000}, "is no control token"),
    ("preprocessor_config.json", {"sampling_rate": 8000}, "windows that its encoder does not hear"),
    ("preprocessor_config.json", {"chunk_length": 2}, "windows that its encoder does not hear"),
])  # fmt: skip
def test_models_whose_way_is_not_known_are_named(tmp_path, name, change, why):
    path = hearing.write(tmp_path / "qwen2_audio", "qwen2_audio")
    config = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(config | change))
    with pytest.raises(NoMedia, match=why):
        _ = Tokenizer(path).sounds
    with pytest.raises(NoMedia, match="no processor"):
        _ = Tokenizer(path).pictures
