"""Speech written down while it is spoken, by OpenAI's client and the recogniser that comes with the project."""

from __future__ import annotations

import asyncio
import base64
import json
import wave
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
import openai
import pytest
import torch
import uvicorn
import websockets
from openai import AsyncOpenAI

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.gateway.http import realtime
from serve_app.gateway.http.app import build_http
from serve_app.gateway.http.routes.dialects import realtime as route
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from tests.tasks.conftest import ACCOUNT, KEY

MODEL = "@cf/pico/pico-hearing"
# The same with a price for sessions.
STREAMED = "@cf/test/streamed"
FOLDER = PROJECT_ROOT / "checkpoints" / "pico-hearing"
SAID = "Turn off the radio in the kitchen."
RATE = 16_000


@pytest.fixture(scope="module")
def recogniser(tmp_path_factory) -> Any:
    threads, home = torch.get_num_threads(), tmp_path_factory.mktemp("home")
    spec = WorkerSpec(MODEL, "predictor", {"path": str(FOLDER)}, str(home / "x.yaml"), str(home),
                      task="automatic-speech-recognition", dtype="float32", cpu_threads=1)  # fmt: skip
    yield PredictWork(spec, lambda step: None)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


class Server:
    """A gateway at ``url``; ``calls``: how often the worker was asked. While ``gate`` is not set it answers nothing."""

    def __init__(self, served: Any, url: str) -> None:
        self.served, self.url, self.calls, self.answered = served, url, 0, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = 0

    def connect(self, prefix: str = "/v1", key: str = KEY, model: str = MODEL) -> Any:
        client = AsyncOpenAI(api_key=key, base_url=self.url + prefix, max_retries=0)
        return client.realtime.connect(model=model, extra_query={"intent": "transcription"}, max_retries=0)


@pytest.fixture
async def server(serve, recogniser, tmp_path) -> AsyncIterator[Server]:
    async def call(model, method, wire):
        made.calls += 1
        try:
            await made.gate.wait()
            found = await recogniser.predict(wire)
            made.answered += 1
            return found
        except asyncio.CancelledError:
            made.left += 1
            raise

    (tmp_path / "models").mkdir()
    price = "neurons: {audio_minute: 10, streamed_audio_minute: 60}"
    (tmp_path / "models" / "streamed.yaml").write_text(
        f'id: "{STREAMED}"\ntask: automatic-speech-recognition\ndescription: Of a test.\ncreated_at: "2026-01-02"\n'
        f"weights: {{path: {FOLDER}}}\nprice: {{{price}}}\nserving: {{local: {{predictor: {{}}}}}}\n"
    )
    async with serve(call, models=(MODEL, STREAMED)) as served:
        config = uvicorn.Config(build_http(served.gateway), "127.0.0.1", 0, log_level="error", lifespan="off")
        running = uvicorn.Server(config)
        task = asyncio.ensure_future(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        made = Server(served, f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}")
        yield made
        running.should_exit = True
        await task


def spoken() -> np.ndarray:
    with wave.open(str(FOLDER / "example.wav")) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def quiet(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 30, int(seconds * RATE)).astype(np.int16)


def session(**heard: Any) -> dict[str, Any]:
    told = {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": {"model": MODEL}, **heard}
    return {"type": "transcription", "audio": {"input": told}}


async def sends(connection: Any, samples: np.ndarray, at_once: float = 0.25) -> None:
    step = int(at_once * RATE)
    for at in range(0, len(samples), step):
        audio = base64.b64encode(samples[at : at + step].tobytes()).decode()
        await connection.input_audio_buffer.append(audio=audio)


async def until(connection: Any, kind: str, count: int = 1) -> list[Any]:
    """All events up to the one of that kind."""
    found: list[Any] = []
    while sum(one.type == kind for one in found) < count:
        found.append(await connection.recv())
        assert found[-1].type != "error" or kind == "error", found[-1]
    return found


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


@pytest.mark.parametrize("prefix", ["/v1", ACCOUNT + "/v1"])
async def test_turns_are_found_and_written_down(server, prefix):
    async with server.connect(prefix) as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.session.update(session=session())
        shown = (await connection.recv()).session.audio.input
        assert shown.turn_detection.type == "server_vad" and shown.transcription.model == MODEL
        await sends(connection, np.concatenate([quiet(1), spoken(), quiet(2), spoken(), quiet(1)]))
        events = await until(connection, COMPLETED, 2)
    kinds = [one.type for one in events if one.type.startswith("input_audio_buffer")]
    assert kinds == [f"input_audio_buffer.{kind}" for kind in ("speech_started", "speech_stopped", "committed")] * 2
    done = [one for one in events if one.type == COMPLETED]
    assert [one.transcript for one in done] == [SAID, SAID]
    begins = [one for one in events if one.type == "input_audio_buffer.speech_started"]
    assert [one.item_id for one in begins] == [one.item_id for one in done]
    # Spoken from 1.1 and from 5.6 seconds on, and heard 0.3 s before.
    assert 500 < begins[0].audio_start_ms < 1300 and 5000 < begins[1].audio_start_ms < 5800
    assert {one.item_id for one in events if one.type == DELTA} <= {one.item_id for one in done}
    assert all(2 < one.usage.seconds < 4 for one in done)
    # Each turn is one piece of work, and what lies between costs nothing.
    assert server.served.endings == [("automatic-speech-recognition", "done")] * 2
    charged = sorted(settled.entry.units["audio_ms"] for settled in server.served.settled)
    assert charged == pytest.approx(sorted(1000 * one.usage.seconds for one in done), abs=2)
    # And says what it cost as it ends.
    assert sorted(one.usage.neurons for one in done) == sorted(s.entry.neurons / 1e6 for s in server.served.settled)


async def test_a_price_for_sessions_is_the_one_that_counts(server):
    async with server.connect(model=STREAMED) as connection:
        await connection.session.update(session=session(transcription={"model": STREAMED}, turn_detection=None))
        await sends(connection, spoken())
        await connection.input_audio_buffer.commit()
        done = (await until(connection, COMPLETED))[-1]
    [settled] = server.served.settled
    assert settled.entry.units["streamed_audio_ms"] == pytest.approx(1000 * done.usage.seconds, abs=1)
    assert "audio_ms" not in settled.entry.units
    assert done.usage.neurons == settled.entry.neurons / 1e6 == pytest.approx(done.usage.seconds, rel=0.01)


async def test_interim_results(server):
    """Words come while the turn goes on; what was told is not taken back."""
    async with server.connect() as connection:
        await connection.recv()
        await connection.session.update(session=session())
        await connection.recv()
        await sends(connection, quiet(0.5))
        told, sound = "", np.concatenate([spoken(), quiet(0.1), spoken()])
        for at in range(0, len(sound), RATE // 5):
            await sends(connection, sound[at : at + RATE // 5])
            # An event that is wrong is answered when those before it are done.
            await connection.send({"type": "none"})
            told += "".join(event.delta for event in await until(connection, "error") if event.type == DELTA)
            while server.answered < server.calls:
                await asyncio.sleep(0.01)
            await connection.send({"type": "none"})
            told += "".join(event.delta for event in await until(connection, "error") if event.type == DELTA)
        assert told and f"{SAID} {SAID}".startswith(told) and server.calls > 2 and server.served.endings == []
        await connection.input_audio_buffer.commit()
        events = await until(connection, COMPLETED)
    told += "".join(event.delta for event in events if event.type == DELTA)
    assert told == f"{SAID} {SAID}" == events[-1].transcript


async def test_a_client_that_ends_its_turns_itself(server):
    async with server.connect() as connection:
        await connection.recv()
        await connection.session.update(session=session(turn_detection=None))
        assert (await connection.recv()).session.audio.input.turn_detection is None
        await sends(connection, spoken())
        await connection.input_audio_buffer.clear()
        assert (await connection.recv()).type == "input_audio_buffer.cleared"
        await sends(connection, spoken())
        await connection.input_audio_buffer.commit()
        events = await until(connection, COMPLETED)
        assert [one.type for one in events][0] == "input_audio_buffer.committed" and events[-1].transcript == SAID
        await connection.input_audio_buffer.commit()
        error = (await until(connection, "error"))[-1].error
        assert "nothing to commit" in error.message and error.type == "invalid_request_error"


WRONG: tuple[tuple[Any, str], ...] = (
    ("no JSON", "no JSON"), ("[]", "object"), ({"type": "response.create"}, "not known"),
    ({"type": "input_audio_buffer.append", "audio": "?"}, "base64"),
    ({"type": "input_audio_buffer.append", "audio": "QUJD"}, "whole samples"),
    ({"type": "input_audio_buffer.append", "audio": 5}, "audio must be a string"),
    ({"type": "session.update", "session": 5}, "object"),
    ({"type": "session.update", "session": {"type": "realtime"}}, "transcription sessions"),
    ({"type": "session.update", "session": session(format={"type": "audio/pcmu"})}, "audio/pcm"),
    ({"type": "session.update", "session": session(turn_detection={"type": "semantic_vad"})}, "server_vad"),
    ({"type": "session.update", "session": session(turn_detection={"type": "server_vad", "threshold": 9})},
     "threshold"),
)  # fmt: skip


async def test_events_that_are_wrong(server):
    """Are told of, and the session goes on."""
    async with server.connect() as connection:
        await connection.recv()
        for event, words in WRONG:
            named = {**event, "event_id": "mine"} if isinstance(event, dict) else event
            await connection._connection.send(named if isinstance(named, str) else json.dumps(named))
            error = (await connection.recv()).error
            assert words in error.message and error.event_id == ("mine" if isinstance(event, dict) else None), event
        await connection.session.update(session=session())
        assert (await connection.recv()).type == "session.updated"


async def test_who_may_not_and_models_that_are_not_here(server, monkeypatch):
    for connecting, status in (
        (server.connect(key="wrong"), 401), (server.connect("/client/v4/accounts/other/ai/v1"), 403),
    ):  # fmt: skip
        with pytest.raises((websockets.InvalidStatus, openai.OpenAIError)) as refused:
            async with connecting:
                pass
        assert str(status) in str(refused.value)
        # By which HAProxy passes on what a gateway says.
        assert len(refused.value.response.headers["cf-ray"]) == 32
    monkeypatch.setattr(route, "EACH", 1)
    async with server.connect(model="@cf/no/such") as connection:
        with pytest.raises((websockets.InvalidStatus, openai.OpenAIError), match="429"):
            async with server.connect():
                pass
        await connection.recv()
        await connection.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        await connection.recv()
        await sends(connection, spoken())
        await connection.input_audio_buffer.commit()
        assert "No such model" in (await connection.recv()).error.message
        # An event that is too long closes the socket, and its place is free again.
        await connection._connection.send("x" * (route.MAX_EVENT_BYTES + 1))
        assert "smaller parts" in (await connection.recv()).error.message
        with pytest.raises(websockets.ConnectionClosed):
            await connection.recv()
    # So do many that are not heard, since turns before them wait.
    monkeypatch.setattr(route, "MOST_BEHIND_BYTES", 300_000)
    server.gate.clear()
    async with server.connect() as connection:
        await connection.recv()
        await connection.session.update(session=session(turn_detection=None))
        await connection.recv()
        for _ in range(6):
            await sends(connection, spoken(), 10)
            await connection.input_audio_buffer.commit()
        with suppress(websockets.ConnectionClosed, openai.OpenAIError):
            for _ in range(20):
                await sends(connection, spoken(), 10)
        told = []
        with suppress(websockets.ConnectionClosed):
            while True:
                told.append(await connection.recv())
        assert "faster than it is heard" in told[-1].error.message
    while server.served.endings.count(("automatic-speech-recognition", "left")) < realtime.BEHIND:
        await asyncio.sleep(0.01)


async def test_who_leaves_ends_the_work(server):
    async with server.connect() as connection:
        await connection.recv()
        await connection.session.update(session=session(turn_detection=None))
        await connection.recv()
        server.gate.clear()
        await sends(connection, spoken())
        await connection.input_audio_buffer.commit()
        while not server.calls:
            await asyncio.sleep(0.01)
    while server.served.endings != [("automatic-speech-recognition", "left")]:
        await asyncio.sleep(0.01)
    assert server.left == 1 and server.served.settled[0].entry is None
