"""Speech through a gateway: the native shapes, OpenAI's route in all its formats, streams, usage, errors."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from serve_app.api.speech import MEDIA_TYPES, SpeakRequest
from serve_app.tasks.sound import encoded
from serve_app.wire.generate import Failed
from serve_app.wire.predict import PredictCall, Predicted
from tests.media.test_encoding import decoded
from tests.tasks.conftest import ACCOUNT, KEY

RATE = 16_000
TEXT = "The first sentence is here. The second sentence is here. And here is the third one."


class Worker:
    """Says a tone of half a second for each sentence, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []

    async def __call__(self, model, method, call: PredictCall):
        [text], options = [data.decode() for data in call.inputs], json.loads(call.options)
        self.asked.append((text, options))
        if options["voice"] == "9":
            return Failed("voice: this model has voices 0 to 2, got '9'.", refused=True)
        silent = text.isdigit()
        times = np.arange(0 if silent else RATE // 2) / RATE
        samples = (np.sin(2 * np.pi * 440 * times) * 9000).astype("<i2").tobytes()
        told = {"samples": base64.b64encode(samples).decode(), "rate": RATE}
        return Predicted((json.dumps(told).encode(),), {"audio_ms": 0 if silent else 500})


@pytest.fixture
async def served(serve, record):
    worker, model = Worker(), record("text-to-speech", "predictor")
    async with serve(worker, models=(model,)) as found:
        yield found, worker, model


async def test_the_native_shapes(served):
    found, worker, model = served
    run = f"{ACCOUNT}/run/{model}"
    coded = await found.http.post(run, json={"prompt": TEXT, "lang": "en", "seed": 7})
    sound = decoded("mp3", base64.b64decode(coded.json()["result"]["audio"]), RATE)
    assert len(sound) == pytest.approx(1.5 * RATE + 2 * 0.15 * RATE, abs=RATE // 5)
    assert worker.asked == [
        (part + ".", {"speed": 1.0, "voice": None, "seed": 7 + number})
        for number, part in enumerate(TEXT.removesuffix(".").split(". "))
    ]
    raw = await found.http.post(run, json={"text": TEXT, "speaker": "1", "encoding": "linear16", "sample_rate": 24000})
    assert raw.headers["content-type"] == "audio/wav" and raw.content[:4] == b"RIFF"
    assert int.from_bytes(raw.content[4:8], "little") == len(raw.content) - 8
    bare = await found.http.post(run, json={"text": "Hello there.", "encoding": "linear16", "container": "none"})
    assert bare.headers["content-type"] == "audio/pcm" and len(bare.content) == RATE // 2 * 2 * 3 // 2
    assert found.endings == [("text-to-speech", "done")] * 3
    units = found.settled[0].entry.units
    assert (units["characters"], units["audio_ms"]) == (len(TEXT), 1500)


@pytest.mark.parametrize("prefix", ["/v1", ACCOUNT + "/v1"])
async def test_openai_s_client(served, prefix):
    found, worker, model = served
    async with httpx.AsyncClient(transport=found.http._transport) as http:
        client = AsyncOpenAI(api_key=KEY, base_url=f"http://here{prefix}", http_client=http, max_retries=0)
        for form, media_type in MEDIA_TYPES.items():
            answer = await client.audio.speech.create(
                model=model, input=TEXT, voice="alloy", response_format=form, speed=1.25
            )
            assert answer.response.headers["content-type"] == media_type
            rate = 24_000 if form == "pcm" else RATE
            seconds = len(decoded(form, answer.content, rate)) / rate
            assert seconds == pytest.approx(1.8, abs=0.2), form
        assert worker.asked[0][1] == {"speed": 1.25, "voice": "alloy", "seed": 0}
    events = await found.http.post(
        f"{prefix}/audio/speech", json={"model": model, "input": TEXT, "voice": "x", "stream_format": "sse"}
    )
    told = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in told[-1:]] == ["speech.audio.done"]
    sound = b"".join(base64.b64decode(event["audio"]) for event in told[:-1])
    assert len(decoded("mp3", sound, RATE)) == pytest.approx(1.8 * RATE, abs=RATE // 5)


async def test_it_is_sent_while_it_is_made(served):
    """The first sentence is there before the last one is asked for, and who leaves ends the rest."""
    found, worker, model = served
    request = SpeakRequest(TEXT + " A fourth one follows. And a fifth one.", form="pcm", stream=True)
    spoken = await found.gateway.perform(found.gateway.models.find(model), request, found.gateway.own())
    pieces = encoded(request, spoken)
    assert len(await anext(pieces)) > 1000
    assert len(worker.asked) == 3
    await pieces.aclose()
    await spoken.aclose()
    assert len(worker.asked) == 3 and found.endings == [("text-to-speech", "left")]
    assert found.settled[0].entry is None


async def test_who_leaves_is_charged_for_the_sentences_that_were_sent(served):
    found, worker, model = served
    request = SpeakRequest(TEXT, form="pcm", stream=True)
    spoken = await found.gateway.perform(found.gateway.models.find(model), request, found.gateway.own())
    pieces = encoded(request, spoken)
    for _ in range(4):  # two sentences with the silence behind each of them
        await anext(pieces)
    assert len(worker.asked) == 3
    await pieces.aclose()
    await spoken.aclose()
    entry = found.settled[0].entry
    assert entry.status == "left" and entry.units == {
        "characters": len("The first sentence is here.The second sentence is here."), "audio_ms": 1000,
        "input_tokens": 0, "cached_tokens": 0, "output_tokens": 0,
    }  # fmt: skip


async def test_what_is_refused(served):
    found, worker, model = served
    run = f"{ACCOUNT}/run/{model}"
    for body in (
        {}, {"prompt": ""}, {"prompt": 5}, {"prompt": "!?"}, {"prompt": "x" * 4097}, {"text": "x", "encoding": "midi"},
        {"text": "x", "sample_rate": 12345}, {"text": "x", "speed": 9}, {"text": "x", "speaker": {"id": "y" * 99}},
        {"text": "x", "bit_rate": 5}, {"text": "x", "seed": -1},
    ):  # fmt: skip
        refused = await found.http.post(run, json=body)
        assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006, body
    assert worker.asked == [] and found.endings == []
    for body, words in (({"text": "Hi.", "speaker": 9}, "voices 0 to 2"), ({"text": "123"}, "none of the characters")):
        refused = await found.http.post(run, json=body)
        assert refused.status_code == 400 and words in refused.text
    speech = "/v1/audio/speech"
    assert (await found.http.post(speech, json={"model": "@cf/no/such", "input": "x"})).status_code == 404
    bad = await found.http.post(speech, json={"model": model, "input": "x", "voice": "9"})
    assert bad.status_code == 400 and "voices 0 to 2" in bad.json()["error"]["message"]
    assert all(settled.entry is None for settled in found.settled)


async def test_what_it_would_cost(served):
    found, worker, model = served
    told = await found.http.post(f"{ACCOUNT}/run/{model}", json={"prompt": TEXT, "options": {"estimate": True}})
    units = told.json()["result"]["units"]
    assert units["least"]["characters"] == len(TEXT) and units["most"]["audio_ms"] > units["expected"]["audio_ms"] > 0
    assert worker.asked == []
