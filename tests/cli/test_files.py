"""`serve-app run` with files: sound in, a transcript out; a text in, sound out."""

from __future__ import annotations

import pytest

from serve_app.api.fields.content import HEARS
from serve_app.api.fields.files import part_file
from tests.cli.conftest import connected
from tests.media.files import sound
from tests.media.test_encoding import decoded
from tests.tasks import test_speaking, test_transcripts


@pytest.fixture
async def models(serve, record, monkeypatch):
    """A recogniser and a speaker."""
    hears, says = record("automatic-speech-recognition", "predictor"), record("text-to-speech", "predictor")
    recogniser, speaker = test_transcripts.Worker(), test_speaking.Worker()

    async def worker(model, method, call):
        return await (recogniser if model.id == hears else speaker)(model, method, call)

    async with serve(worker, models=(hears, says)) as served:
        connected(served, monkeypatch)
        yield hears, says, recogniser


async def test_sound_in_and_out(models, shell, tmp_path):
    hears, says, recogniser = models
    talk, said = tmp_path / "talk.wav", tmp_path / "said.mp3"
    talk.write_bytes(sound(0.1))
    out, _ = await shell("run", hears, "--audio", str(talk))
    assert out == "Hello world. Bye --> now\n" and recogniser.asked[0][0] == talk.read_bytes()
    out, _ = await shell("run", hears, "--audio", str(talk), "--json")
    assert '"word_count": 5' in out
    assert await shell("run", says, "Say this please.", "--out", str(said)) == ("", "")
    assert len(decoded("mp3", said.read_bytes(), 16_000)) > 7000
    _, err = await shell("run", says, "Say this please.", status=1)
    assert "--out" in err
    _, err = await shell("run", hears, "--audio", str(tmp_path / "none.wav"), status=2)
    assert "none.wav can't be read" in err
    _, err = await shell("run", hears, "--audio", str(talk), "--out", str(said), status=1)
    assert "without sound" in err


async def test_a_chat_model_is_asked_about_a_sound(echo, shell, tmp_path):
    talk, asked = tmp_path / "talk.wav", ("run", echo.model, "What is said?", "--audio", str(tmp_path / "talk.wav"))
    talk.write_bytes(sound(0.1))
    _, err = await shell(*asked, status=1)
    assert "audio is not supported" in err
    echo.backend.takes = HEARS
    await shell(*asked, "--system", "Be brief.", "--max-tokens", "7", "--temperature", "0")
    [request] = echo.backend.asked
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0)
    rules, question = request.messages
    heard, text = question["content"]
    assert rules == {"role": "system", "content": "Be brief."} and text == {"type": "text", "text": "What is said?"}
    assert part_file(heard, "") == talk.read_bytes()
