"""OpenAI's transcriptions and translations: forms with a file, and five ways to write a transcript."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import Range
from serve_app.api.multipart import BodyPart
from serve_app.api.transcripts import Pauses, SpeechTask, TranscribeRequest, srt, vtt, words_of

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")
MAX_PROMPT = 2000
# What a client says of pauses, and what it is here.
_VAD = (
    ("threshold", Range(0, 1, whole=False), ("threshold", 1.0)),
    ("silence_duration_ms", Range(0, 60_000, whole=False), ("pause_s", 0.001)),
    ("prefix_padding_ms", Range(0, 60_000, whole=False), ("before_s", 0.001)),
)


@dataclass(slots=True, frozen=True)
class Form:
    """``model``: what the client calls it. ``form``: one of `FORMATS`."""

    model: str
    request: TranscribeRequest
    form: str = "json"
    words: bool = False
    stream: bool = False


def parse_form(parts: list[BodyPart], task: SpeechTask) -> Form:
    """The fields of a form. ``temperature`` is checked and not used: transcripts are the likeliest text. Raises
    `InvalidInput`.
    """
    fields: dict[str, list[BodyPart]] = {}
    for part in parts:
        fields.setdefault(part.name.removesuffix("[]"), []).append(part)

    def text(name: str, most: int) -> str:
        found = fields[name][-1].text.strip() if name in fields else ""
        if len(found) > most:
            raise InvalidInput(f"{name} must have at most {most} characters, got {len(found)}.", param=name)
        return found

    model = text("model", 512)
    if not model:
        raise InvalidInput("model is missing; name a model as a part of the form.", param="model")
    if "file" not in fields or not fields["file"][-1].data:
        raise InvalidInput("file is missing; send the sound as a part of the form.", param="file")
    form = text("response_format", 64) or "json"
    if form not in FORMATS:
        raise InvalidInput(f"response_format must be one of {', '.join(FORMATS)}.", param="response_format")
    if temperature := text("temperature", 32):
        try:
            within = 0 <= float(temperature) <= 1
        except ValueError:
            within = False
        if not within:
            raise InvalidInput("temperature must be a number from 0 to 1.", param="temperature")
    wanted = [part.text.strip() for part in fields.get("timestamp_granularities", [])]
    if not set(wanted) <= set(GRANULARITIES):
        raise InvalidInput("timestamp_granularities must be word or segment, or both.", param="timestamp_granularities")
    words = form == "verbose_json" and "word" in wanted
    request = TranscribeRequest(
        fields["file"][-1].data,
        task,
        text("language", 32) or None,
        text("prompt", MAX_PROMPT) or None,
        words=words,
        pauses=_pauses(text),
    )
    return Form(model, request, form, words, text("stream", 8).lower() == "true")


def _pauses(text: Callable[[str, int], str]) -> Pauses | None:
    """``chunking_strategy``: `auto`, or the fields of `server_vad`, as text or in fields of their own. Raises
    `InvalidInput`.
    """
    name = "chunking_strategy"
    given = text(name, 512)
    if given == "auto":
        return Pauses()
    inner = ("type", *(one for one, _, _ in _VAD))
    found: Any = {one: value for one in inner if (value := text(f"{name}[{one}]", 32))}
    if given:
        try:
            found = orjson.loads(given)
        except orjson.JSONDecodeError:
            found = None
    if found == {}:
        return None
    if not isinstance(found, dict) or found.get("type") != "server_vad":
        raise InvalidInput(f'{name} must be "auto" or an object with type server_vad.', param=name)
    values = {}
    for one, allowed, (field, scale) in _VAD:
        if isinstance(found.get(one), str):
            with suppress(ValueError):
                found[one] = float(found[one])
        if (value := allowed.read(found, one)) is not None:
            values[field] = value * scale
    return Pauses(**values)


def render(form: Form, told: dict[str, Any]) -> tuple[bytes, str]:
    """The answer and its media type."""
    segments, text = told["segments"], told["text"].strip()
    if form.form == "text":
        return f"{text}\n".encode(), "text/plain; charset=utf-8"
    if form.form == "srt":
        return srt(segments).encode(), "text/plain; charset=utf-8"
    if form.form == "vtt":
        return vtt(segments).encode(), "text/vtt; charset=utf-8"
    answer: dict[str, Any] = {"text": text, "usage": _usage(told)}
    if form.form == "verbose_json":
        answer |= {"task": form.request.task, "language": told["language_name"], "duration": told["duration"]}
        answer["segments"] = [
            {"id": number, "seek": round(segment["start"] * 100), **{k: v for k, v in segment.items() if k != "words"}}
            for number, segment in enumerate(segments)
        ]
        if form.words:
            answer["words"] = words_of(segments)
    return orjson.dumps(answer), "application/json"


def events(told: dict[str, Any]) -> Iterator[bytes]:
    """The transcript as server-sent events: a delta for each segment, and all of it."""
    for segment in told["segments"]:
        yield _event({"type": "transcript.text.delta", "delta": segment["text"]})
    yield _event({"type": "transcript.text.done", "text": told["text"].strip(), "usage": _usage(told)})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _usage(told: dict[str, Any]) -> dict[str, Any]:
    # Whole seconds, as OpenAI rounds them.
    return {"type": "duration", "seconds": -int(-told["duration"] // 1), **told["price"]}
