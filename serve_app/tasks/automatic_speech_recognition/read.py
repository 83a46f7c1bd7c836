"""The native bodies of speech recognition: the file, an array of its bytes, or base64 with options beside it."""

from __future__ import annotations

from serve_app.api.fields.files import read_file
from serve_app.api.fields.ranges import Range
from serve_app.api.fields.values import boolean, choice, string
from serve_app.api.transcripts import Pauses, TranscribeRequest
from serve_app.api.workers_ai.read import open_native
from serve_app.tasks.task import Body

BEAMS = Range(1, 16)
SHARE = Range(0, 1, whole=False)
LOGPROB = Range(-100, 0, whole=False)
MAX_PROMPT = 2000


def parse_transcribe(body: Body) -> TranscribeRequest:
    """Whisper's three forms; what only other decoders have is not looked at."""
    if body.data:
        return TranscribeRequest(body.data, words=True)
    fields, asked = open_native(body.json)
    # In Whisper's own words a prefix is what the transcript begins with; both give it a context.
    prompt = [string(fields, name, limit=MAX_PROMPT) for name in ("initial_prompt", "prefix")]
    return TranscribeRequest(
        read_file(b"", fields, "audio"),
        choice(fields, "task", ("transcribe", "translate")) or "transcribe",  # type: ignore[arg-type]
        string(fields, "language", limit=32) or None,
        " ".join(part for part in prompt if part) or None,
        BEAMS.read(fields, "beam_size") or 1,
        True,
        SHARE.read(fields, "no_speech_threshold"),
        LOGPROB.read(fields, "log_prob_threshold"),
        Pauses() if boolean(fields, "vad_filter") else None,
        **asked,
    )
