"""Speech recognition through a gateway: Whisper's three shapes, OpenAI's routes in all their formats, usage, errors."""

from __future__ import annotations

import base64
import json

import httpx
import pytest
from openai import AsyncOpenAI

from serve_app.api.transcripts import srt, vtt
from serve_app.wire.generate import Failed
from serve_app.wire.predict import PredictCall, Predicted
from tests.media.files import sound
from tests.tasks.conftest import ACCOUNT, KEY

SEGMENTS = [
    {"start": 0.0, "end": 1.5, "text": " Hello world.", "tokens": [1, 2], "temperature": 0.0, "avg_logprob": -0.5,
     "compression_ratio": 1.1, "no_speech_prob": 0.01,
     "words": [{"word": "Hello", "start": 0.0, "end": 0.7}, {"word": "world.", "start": 0.7, "end": 1.5}]},
    {"start": 3661.5, "end": 3662.0, "text": " Bye --> now", "tokens": [3], "temperature": 0.0, "avg_logprob": -0.2,
     "compression_ratio": 0.9, "no_speech_prob": 0.02, "words": [{"word": "Bye", "start": 3661.5, "end": 3662.0}]},
]  # fmt: skip
TOLD = {"text": " Hello world. Bye --> now", "language": "en", "language_name": "english", "language_probability": 0.9,
        "duration": 3662.0, "segments": SEGMENTS}  # fmt: skip
CLOCK = "00:00:00.000 --> 00:00:01.500\nHello world.\n\n01:01:01.500 --> 01:01:02.000\nBye -> now\n"


class Worker:
    """Answers as a recogniser does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, dict]] = []

    async def __call__(self, model, method, call: PredictCall):
        options = json.loads(call.options)
        self.asked.append((call.inputs[0], options))
        if call.inputs[0] == b"bad":
            return Failed(
                "audio: it is no sound file that is known. Send WAV, FLAC, MP3, Ogg, M4A or WebM.", refused=True
            )
        return Predicted((json.dumps(TOLD).encode(),), {"audio_ms": 3_662_000})


@pytest.fixture
async def served(serve, record):
    worker, model = Worker(), record("automatic-speech-recognition", "predictor")
    async with serve(worker, models=(model,)) as found:
        yield found, worker, model


async def test_whisper_s_three_shapes(served) -> None:
    found, worker, model = served
    file = sound(0.1)
    run = f"{ACCOUNT}/run/{model}"
    coded = base64.b64encode(file).decode()
    options = {"task": "translate", "language": "de", "initial_prompt": "Köln", "beam_size": 3, "vad_filter": True}
    answers = [
        await found.http.post(run, content=file, headers={"Content-Type": "audio/wav"}),
        await found.http.post(run, json={"audio": list(file)}),
        await found.http.post(run, json={"audio": coded, **options}),
        await found.http.post(run, json={"audio": {"body": coded, "contentType": "audio/wav"}}),
    ]
    assert [data for data, _ in worker.asked] == [file] * 4
    assert {k: v for k, v in worker.asked[2][1].items() if v} == {
        "task": "translate", "language": "de", "prompt": "Köln", "beams": 3, "words": True,
        "pauses": {"threshold": 0.5, "pause_s": 1.0, "before_s": 0.3, "behind_s": 0.3},
    }  # fmt: skip
    for answer in answers:
        result = answer.json()["result"]
        assert (result["text"], result["word_count"]) == ("Hello world. Bye --> now", 5)
        assert result["vtt"] == "WEBVTT\n\n" + CLOCK
        assert [word["word"] for word in result["words"]] == ["Hello", "world.", "Bye"]
        assert result["transcription_info"]["language"] == "en" and result["transcription_info"]["duration"] == 3662.0
        assert [s["start"] for s in result["segments"]] == [0.0, 3661.5] and "tokens" not in result["segments"][0]
    assert found.endings == [("automatic-speech-recognition", "done")] * 4
    assert found.settled[0].entry.units["audio_ms"] == 3_662_000
    for body in ({}, {"audio": 5}, {"audio": coded, "task": "sing"}, {"audio": coded, "beam_size": 99}):
        refused = await found.http.post(run, json=body)
        assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006
    broken = await found.http.post(run, content=b"bad", headers={"Content-Type": "audio/wav"})
    assert broken.status_code == 400 and "no sound file" in broken.text


@pytest.mark.parametrize("prefix", ["/v1", ACCOUNT + "/v1"])
async def test_openai_s_client(served, prefix) -> None:
    found, worker, model = served
    transport = found.http._transport
    async with httpx.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(api_key=KEY, base_url=f"http://here{prefix}", http_client=http, max_retries=0)
        file = ("talk.wav", sound(0.1), "audio/wav")
        plain = await client.audio.transcriptions.create(model=model, file=file, language="en", prompt="Hi")
        assert plain.text == "Hello world. Bye --> now" and plain.usage.seconds == 3662
        price = found.settled[-1].entry.neurons / 1e6
        assert plain.usage.neurons == price
        assert worker.asked[0][0] == file[1] and worker.asked[0][1]["language"] == "en"
        for form, wanted in (
            ("text", "Hello world. Bye --> now\n"),
            ("vtt", "WEBVTT\n\n" + CLOCK),
            ("srt", "1\n" + CLOCK.replace(".500 ", ",500 ").replace(".000 ", ",000 ")
                .replace(".500\n", ",500\n").replace(".000\n", ",000\n").replace("\n\n", "\n\n2\n")),
        ):  # fmt: skip
            assert await client.audio.transcriptions.create(model=model, file=file, response_format=form) == wanted
        verbose = await client.audio.transcriptions.create(
            model=model, file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        assert verbose.language == "english" and verbose.duration == 3662.0
        assert [word.word for word in verbose.words] == ["Hello", "world.", "Bye"]
        assert [(s.id, s.start, s.tokens) for s in verbose.segments] == [(0, 0.0, [1, 2]), (1, 3661.5, [3])]
        stream = await client.audio.transcriptions.create(model=model, file=file, stream=True)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events[:-1]) == " Hello world. Bye --> now"
        assert events[-1].type == "transcript.text.done" and events[-1].text == plain.text
        assert events[-1].usage.seconds == 3662 and events[-1].usage.neurons == price
        vad = {"type": "server_vad", "threshold": 0.2, "silence_duration_ms": 250}
        for strategy, wanted in (("auto", (0.5, 1.0, 0.3)), (vad, (0.2, 0.25, 0.3)), (None, None)):
            await client.audio.transcriptions.create(model=model, file=file, chunking_strategy=strategy)
            found_pauses = worker.asked[-1][1]["pauses"]
            assert (found_pauses and tuple(found_pauses.values())[:3]) == wanted
        english = await client.audio.translations.create(model=model, file=file)
        assert english.text == plain.text and worker.asked[-1][1]["task"] == "translate"


async def test_forms_that_are_refused(served) -> None:
    found, _, model = served
    file = {"file": ("a.wav", sound(0.1), "audio/wav")}
    path = "/v1/audio/transcriptions"
    for data, files, words in (
        ({}, file, "model"),
        ({"model": model}, {"x": b"1"}, "file"),
        ({"model": model, "response_format": "diarized_json"}, file, "response_format"),
        ({"model": model, "temperature": "hot"}, file, "temperature"),
        ({"model": model, "language": "x" * 50}, file, "language"),
        ({"model": model, "timestamp_granularities[]": "letter"}, file, "timestamp_granularities"),
        ({"model": model, "chunking_strategy": "loud"}, file, "chunking_strategy"),
        ({"model": model, "chunking_strategy[threshold]": "0.5"}, file, "chunking_strategy"),
        ({"model": model, "chunking_strategy": '{"type": "server_vad", "threshold": 2}'}, file, "threshold"),
        ({"model": model, "chunking_strategy": '{"type": "server_vad", "threshold": []}'}, file, "threshold"),
        (
            {"model": model, "chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "nan"},
            file,
            "threshold",
        ),
    ):
        refused = await found.http.post(path, data=data, files=files)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
    missing = await found.http.post(path, data={"model": "@cf/no/such"}, files=file)
    assert missing.status_code == 404
    assert (await found.http.post(path, json={"model": model})).status_code == 400
    bad = await found.http.post(path, data={"model": model}, files={"file": ("a.wav", b"bad")})
    assert bad.status_code == 400 and "no sound file" in bad.json()["error"]["message"]


def test_cues_hold_what_would_break_them() -> None:
    segments = [{"start": 0.0004, "end": 59.9996, "text": "one\n\ntwo --> three"}]
    assert vtt(segments) == "WEBVTT\n\n00:00:00.000 --> 00:01:00.000\none two -> three\n"
    assert srt(segments) == "1\n00:00:00,000 --> 00:01:00,000\none two -> three\n"
    assert vtt([]) == "WEBVTT\n"
