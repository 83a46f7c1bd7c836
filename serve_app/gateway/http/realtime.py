"""One session of OpenAI's Realtime transcription: a sound comes in, turns are found in it, and each is written down.

::

    sound ──> Listening ──> a turn begins ──> heard again each second ──> words that two hearings agree on: deltas
                                         └──> a turn ends ──> heard as a whole: completed

A turn is one piece of work, counted and charged like a file of its length; hearing it in between is not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import wave
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from io import BytesIO
from typing import Any

import orjson

from serve_app.api import identity
from serve_app.api.errors import InvalidInput, as_api_error, current_request
from serve_app.api.openai import realtime
from serve_app.api.receipt import receipt
from serve_app.api.transcripts import TranscribeRequest
from serve_app.gateway.core import Gateway
from serve_app.media.activity import Pauses
from serve_app.media.listening import Listening
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.wire.generate import Failed
from serve_app.wire.methods import PREDICT
from serve_app.wire.predict import PredictCall

log = logging.getLogger("ray.serve")

# Of new sound, before a turn that goes on is heard again.
AGAIN_S = 1.0
# A turn that the client ends itself is no longer than this.
MANUAL_S = 120.0
# Of sound that is looked through at once; for more there is a thread.
QUICK_BYTES = 32 << 10
# Turns that are over and not written down yet; beyond it nothing more is read.
BEHIND = 4
# Units of sound.
HEARD, STREAMED = "audio_ms", "streamed_audio_ms"

Send = Callable[[dict[str, Any]], Awaitable[None]]
# The model of that name, for this caller; counted as a request.
FindModel = Callable[[str], Awaitable[ServedModel]]


class Transcribing:
    """``send`` writes an event, ``find`` looks a model up. :meth:`take` reads what the client sends."""

    def __init__(self, gateway: Gateway, caller: Caller, model: str, send: Send, find: FindModel) -> None:
        self._gateway, self._caller, self._find = gateway, caller, find
        self._lock = asyncio.Lock()
        self._write = send
        self.session = realtime.Session(f"sess_{secrets.token_hex(12)}", model)
        self._listening: Listening | None = None
        self._manual = bytearray()
        self._turn: _Turn | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._latest: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(BEHIND)
        self._previous: str | None = None

    async def begin(self) -> None:
        await self._send(realtime.event("session.created", session=self.session.shown()))

    async def refuse(self, words: str) -> None:
        """Tells why the session ends."""
        error = realtime.failure(InvalidInput(words))
        await self._send(realtime.event("error", error={**error, "event_id": None}))

    async def take(self, text: str) -> None:
        """One event of the client; what is wrong with it is told."""
        named = None
        try:
            try:
                given = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise InvalidInput(f"The event is no JSON: {error}.") from None
            if not isinstance(given, dict):
                raise InvalidInput("An event must be an object with a type.")
            named = given.get("event_id") if isinstance(given.get("event_id"), str) else None
            await self._do(given)
        except Exception as error:
            await self._send(realtime.event("error", error={**_shown(error), "event_id": named}))

    async def _do(self, given: dict[str, Any]) -> None:
        kind = given.get("type")
        if kind in ("session.update", "transcription_session.update"):
            if self._turn is not None or self._manual:
                raise InvalidInput("The session can be changed between turns alone.")
            self.session = realtime.updated(self.session, given.get("session"))
            self._listening = None
            await self._send(realtime.event("session.updated", session=self.session.shown()))
        elif kind == "input_audio_buffer.append":
            await self._append(realtime.sound(given))
        elif kind == "input_audio_buffer.commit":
            await self._commit()
        elif kind == "input_audio_buffer.clear":
            self._drop()
            await self._send(realtime.event("input_audio_buffer.cleared"))
        else:
            said = str(kind)[:80]
            raise InvalidInput(f"type {said!r} is not known to transcription sessions.", param="type")

    async def _append(self, pcm: bytes) -> None:
        if self.session.turns is None:
            if len(self._manual) + len(pcm) > MANUAL_S * self.session.rate * 2:
                raise InvalidInput(f"The buffer holds at most {MANUAL_S:g} seconds; commit or clear it.")
            self._manual += pcm
            return
        if self._listening is None:
            self._listening = Listening(self.session.rate, Pauses(**asdict(self.session.turns)))
        feed = self._listening.feed
        # What comes as one speaks is a matter of less than a millisecond.
        for turn in feed(pcm) if len(pcm) <= QUICK_BYTES else await asyncio.to_thread(feed, pcm):
            if turn.kind == "begins":
                self._turn = _Turn(self, await self._model())
                told = {"audio_start_ms": turn.at, "item_id": self._turn.item}
                await self._send(realtime.event("input_audio_buffer.speech_started", **told))
            elif self._turn is not None:
                told = {"audio_end_ms": turn.at, "item_id": self._turn.item}
                await self._send(realtime.event("input_audio_buffer.speech_stopped", **told))
                await self._over(self._turn, turn.pcm)
        if self._turn is not None and self._listening.speaking:
            self._turn.hear(self._listening.so_far)

    async def _commit(self) -> None:
        if self.session.turns is None:
            pcm, self._manual = bytes(self._manual), bytearray()
        else:
            ended = self._listening.end() if self._listening is not None else None
            pcm = b"" if ended is None else ended.pcm
        if not pcm:
            raise InvalidInput("There is nothing to commit: the buffer holds no speech.")
        await self._over(self._turn or _Turn(self, await self._model()), pcm)

    async def _over(self, turn: _Turn, pcm: bytes) -> None:
        """Writes the turn down beside what is read next."""
        self._turn = None
        told = {"previous_item_id": self._previous, "item_id": turn.item}
        self._previous = turn.item
        await self._send(realtime.event("input_audio_buffer.committed", **told))
        await self._places.acquire()
        task = asyncio.ensure_future(turn.finish(pcm, self._latest))
        self._latest = task
        self._ending.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        self._places.release()

    def _drop(self) -> None:
        self._manual.clear()
        self._listening = None
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    async def _model(self) -> ServedModel:
        if not self.session.model:
            raise InvalidInput("model is missing; name one in audio.input.transcription of a session.update.")
        return await self._find(self.session.model)

    async def _send(self, told: dict[str, Any]) -> None:
        async with self._lock:
            await self._write(told)

    async def close(self) -> None:
        """Ends all work: nobody listens any more."""
        self._drop()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)


class _Turn:
    def __init__(self, owner: Transcribing, model: ServedModel) -> None:
        self.item = f"item_{secrets.token_hex(12)}"
        self._owner, self._model, self._session = owner, model, owner.session
        self._hearing: asyncio.Task[None] | None = None
        self._heard_bytes = 0
        # The words of the last hearing; how many have been told, and as what.
        self._words: list[str] = []
        self._told = 0
        self._spoken = ""

    def hear(self, so_far: Callable[[], bytes]) -> None:
        """Hears what has come of the turn, if there is enough that is new and nothing is being heard."""
        if self._hearing is not None and not self._hearing.done():
            return
        pcm = so_far()
        if len(pcm) - self._heard_bytes < AGAIN_S * self._session.rate * 2:
            return
        self._heard_bytes = len(pcm)
        self._hearing = asyncio.ensure_future(self._between(pcm))

    def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()

    async def _between(self, pcm: bytes) -> None:
        """Tells the words that this hearing and the last one agree on; the last word may not be whole yet."""
        runtime = self._owner._gateway.runtime
        caller, options = self._owner._caller, json.dumps(self._request(b"").options).encode()
        call = PredictCall((self._file(pcm),), options, caller.priority, runtime.salt(caller.account))
        try:
            result = await runtime.call(self._model, PREDICT, call)
        except Exception:  # the whole turn is heard later, and tells what is wrong
            return
        if isinstance(result, Failed):
            return
        words = str(orjson.loads(result.results[0])["text"]).split()[:-1]
        same = 0
        for one, other in zip(words, self._words, strict=False):
            if one != other:
                break
            same += 1
        self._words = words
        if same > self._told:
            # What was told is not taken back: it has to be what is heard now.
            await self._tell(words[self._told : same])

    async def _tell(self, words: list[str]) -> None:
        delta = (" " if self._told else "") + " ".join(words)
        self._told += len(words)
        self._spoken += delta
        await self._owner._send(realtime.transcription("delta", self.item, delta=delta))

    async def finish(self, pcm: bytes, before: asyncio.Task[None] | None) -> None:
        """Hears the whole turn, and tells it once the turn ``before`` is told."""
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.wait({self._hearing})
        request_id = secrets.token_hex(16)
        current_request.set(request_id)
        identity.current.set(identity.Identity(request_id, time.time()))
        owner = self._owner
        try:
            try:
                text, usage = await self._whole(pcm)
            finally:
                if before is not None:
                    await asyncio.wait({before})
            # Where the whole turn is heard otherwise, its transcript alone tells so.
            if text.startswith(self._spoken) and (rest := text.removeprefix(self._spoken)):
                await owner._send(realtime.transcription("delta", self.item, delta=rest))
            await owner._send(realtime.transcription("completed", self.item, transcript=text, usage=usage))
        except Exception as error:
            await owner._send(realtime.transcription("failed", self.item, error=_shown(error)))

    async def _whole(self, pcm: bytes) -> tuple[str, dict[str, Any]]:
        """Its text, and what it took and costs: the entry is safe by now."""
        owner = self._owner
        runtime = owner._gateway.runtime
        request = self._request(self._file(pcm))
        # Where the model has a price for this way, that is the unit.
        streamed = STREAMED in runtime.quote(self._model).tariff.rates
        worst = {STREAMED if streamed else HEARD: len(pcm) * 500 // self._session.rate + 1}
        async with runtime.work(self._model, owner._caller, facts={"bytes": len(pcm)}, worst=worst) as work:
            [found] = await predict(runtime, work, [request.audio], request.options)
            if streamed:
                work.units[STREAMED] = work.units.pop(HEARD)
        usage = {"type": "duration", "seconds": float(found["duration"]), **receipt(work.usage)}
        return str(found["text"]).strip(), usage

    def _request(self, audio: bytes) -> TranscribeRequest:
        return TranscribeRequest(audio, "transcribe", self._session.language, self._session.prompt)

    def _file(self, pcm: bytes) -> bytes:
        out = BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self._session.rate)
            file.writeframes(pcm)
        return out.getvalue()


def _shown(error: Exception) -> dict[str, Any]:
    shown = as_api_error(error)
    if shown is not error:
        log.error("a session failed: %s", shown.message, exc_info=error)
    return realtime.failure(shown)
