"""Speech recognition: a sound in, a transcript with its times out."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.envelopes import success
from serve_app.api.receipt import receipt
from serve_app.api.transcripts import TranscribeRequest, vtt, words_of
from serve_app.api.types import ModelLimits
from serve_app.media.limits import longest_s
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.automatic_speech_recognition.declaration import DECLARATION
from serve_app.tasks.automatic_speech_recognition.read import parse_transcribe
from serve_app.tasks.automatic_speech_recognition.schema import input_schema, output_schema
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.task import Answer, Body, BodyLimits, Task
from serve_app.tasks.work import Runtime


class SpeechRecognition(Task):
    declaration: ClassVar = DECLARATION
    takes: ClassVar = TranscribeRequest
    bodies: ClassVar = frozenset({"json", "bytes"})

    def body_limit(self, settings: BodyLimits) -> int:
        return settings.max_media_body_bytes

    def schema(self, limits: ModelLimits | None = None) -> dict[str, dict[str, Any]]:
        return {"input": input_schema(), "output": output_schema()}

    def read(self, body: Body, model: ServedModel, limits: ModelLimits) -> TranscribeRequest:
        return parse_transcribe(body)

    async def run(
        self, runtime: Runtime, model: ServedModel, request: TranscribeRequest, caller: Caller
    ) -> dict[str, Any]:
        """The worker's transcript: text, language, duration and segments; and its ``price``."""
        size = len(request.audio)
        worst = {"audio_ms": longest_s(size) * 1000}
        busy = request.reject_if_busy
        async with runtime.work(model, caller, reject_if_busy=busy, facts={"bytes": size}, worst=worst) as work:
            [found] = await predict(runtime, work, [request.audio], request.options)
        return {**found, "price": receipt(work.usage)}

    async def answer(
        self, runtime: Runtime, model: ServedModel, request: TranscribeRequest, result: dict[str, Any]
    ) -> Answer:
        segments = result["segments"]
        told = ("start", "end", "text", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob", "words")
        return Answer(
            success(
                {
                    "transcription_info": {
                        "language": result["language"],
                        "language_probability": result["language_probability"],
                        "duration": result["duration"],
                        "duration_after_vad": result.get("heard", result["duration"]),
                    },
                    "text": result["text"].strip(),
                    "word_count": len(result["text"].split()),
                    "words": words_of(segments),
                    "segments": [{name: segment[name] for name in told if name in segment} for segment in segments],
                    "vtt": vtt(segments),
                }
            )
        )


TASK = SpeechRecognition()
