"""Sounds before a request waits for anything: measured in another process, remembered, refused with the reason."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.sounds import sound_part
from serve_app.api.types import GenerateRequest
from serve_app.gateway.backends.media import MAX_FILES
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import body_limit
from tests import hearing
from tests.gateway.backends.conftest import question, served
from tests.media.files import bad_sounds
from tests.media.files import sound as tone

SALT, OTHER = b"one account's", b"another's"


@pytest.fixture(scope="module", params=["voxtral", "qwen2_audio"])
def model(request, tmp_path_factory):
    path = hearing.write(tmp_path_factory.mktemp("model") / request.param, request.param)
    return served(path, hearing=True)


def asks(*files: bytes) -> GenerateRequest:
    said = [{"data": base64.b64encode(file).decode(), "format": "wav"} for file in files]
    parts = [sound_part({"type": "input_audio", "input_audio": one}, "x") for one in said]
    return question(parts)


async def test_sounds_count_as_tokens_of_the_prompt(backend, model):
    assert model.takes == model.limits.takes == {"text", "audio"}
    limits = SimpleNamespace(max_body_bytes=1, max_media_body_bytes=2)
    assert body_limit(model, limits) == 2
    # Whatever the file's rate and number of channels.
    one, two = tone(1.0), tone(0.9, rate=44_100, channels=2)
    plain = await backend.prepare(model, asks(), SALT)
    prepared = await backend.prepare(model, asks(one, two, one), SALT)
    more = 3 * 25 if model.record.weights.path.endswith("voxtral") else 25 + 22 + 25
    marks = 3 if model.record.weights.path.endswith("voxtral") else 6
    assert prepared.prompt_tokens == plain.prompt_tokens + more + marks
    assert prepared.prompt_tokens == await backend.count_tokens(model, asks(one, two, one), SALT)
    first, second, third = (placed.file for placed in prepared.prompt.media)
    assert first.samples == 16_000 and 14_300 < second.samples <= 14_400 and first.digest == third.digest


async def test_bad_files_are_refused_at_once(backend, model):
    await backend.prepare(model, asks(tone(0.3)), SALT)  # the process is up
    slowest = 0.0
    for file in bad_sounds().values():
        began = time.process_time()
        with pytest.raises(InvalidInput, match=r"messages\[0\]\.content"):
            await backend.prepare(model, asks(file), SALT)
        slowest = max(slowest, time.process_time() - began)
    # The time of this process: the other one may be slowed down by anybody.
    assert slowest < 1.0


async def test_a_long_sound_is_refused_when_as_much_is_decoded(backend, model):
    """The rest of it is never read: the longest that this model hears is a second."""
    if model.record.weights.path.endswith("voxtral"):
        pytest.skip("hears half an hour")
    with pytest.raises(InvalidInput, match="the sound is longer than 1 seconds; send it in parts"):
        await backend.prepare(model, asks(tone(400.0, rate=8000)), SALT)


async def test_what_one_account_has_sent_is_unknown_to_another(backend, model, monkeypatch):
    """Or it could be told by the clock."""
    heard, request = [], asks(tone(0.5, pitch=300.0 + len(model.record.weights.path)))
    await backend.prepare(model, request, SALT)
    decoder = backend._looker._decoder
    length = decoder.length
    monkeypatch.setattr(decoder, "length", lambda data, most: heard.append(data) or length(data, most))
    await backend.prepare(model, request, SALT)
    assert not heard
    await backend.prepare(model, request, OTHER)
    await backend.prepare(model, request, OTHER)
    assert len(heard) == 1


async def test_there_is_a_most_of_sounds(backend, model):
    with pytest.raises(InvalidInput, match=f"sounds; at most {MAX_FILES} are taken"):
        await backend.prepare(model, asks(*[tone(0.1)] * (MAX_FILES + 1)), SALT)


async def test_a_family_that_is_not_known_is_named(backend, model, tmp_path):
    path = hearing.write(tmp_path / "other", "qwen2_audio")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "granite_speech"}))
    record = model.record.model_copy(update={"weights": model.record.weights.model_copy(update={"path": str(path)})})
    other = ServedModel(record, model.profile, path, Path("/nonexistent"))
    with pytest.raises(InvalidInput, match="takes no sounds: the way of granite_speech"):
        await backend.prepare(other, asks(tone(0.1)), SALT)
    assert (await backend.prepare(other, asks(), SALT)).prompt_tokens > 0
