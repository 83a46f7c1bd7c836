"""The process that decodes: reads files from its standard input, writes what they hold into a file that it is told.

``python -m serve_app.media.program``. A request is a line of JSON (``kind``, ``size``, ``out``, ``most_s``) and as many
bytes as ``size`` says; an answer is a line of JSON: what the file is, or ``error``. A ``size`` or ``length`` is asked
for without the pixels or samples, but they are decoded: only then is it known that the file is whole. It ends when its
input does. Whatever it reads was written by strangers, so it gives up memory and time that it does not need before it
reads the first byte.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_app.media import allowance
from serve_app.media.audio import decode_audio
from serve_app.media.errors import BadFile
from serve_app.media.images import decode_image, decode_mask
from serve_app.media.limits import CPU_S, FILE_BYTES, MEMORY_BYTES

DECODED = {"image": decode_image, "mask": decode_mask}


def restrict() -> None:
    """Bounds that the kernel keeps."""
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    with suppress(OSError):
        # Where the machine runs out of memory, this process is the first to go.
        Path("/proc/self/oom_score_adj").write_text("1000")


def answer(kind: str, data: bytes, out: str, seconds: float | None = None) -> dict[str, Any]:
    """Decodes into the file ``out``, and says what lies there."""
    if kind not in ("size", *DECODED):
        import av  # noqa: F401  # the first sound's file does not pay for it

    allowance.begin()
    try:
        if kind == "size":
            width, height, _ = decode_image(data)
            return {"width": width, "height": height}
        if kind == "length":
            return {"samples": sum(map(len, decode_audio(data, seconds))) // 2}
        with open(out, "wb") as file:
            if kind in DECODED:
                width, height, pixels = DECODED[kind](data)
                file.writelines(pixels)
                return {"width": width, "height": height}
            written = 0
            for piece in decode_audio(data):
                written += file.write(piece)
            return {"samples": written // 2}
    except BadFile as error:
        return {"error": str(error)}
    except OSError as error:
        return {"failed": f"what was decoded could not be written: {error.strerror}"}
    finally:
        allowance.end()


def main() -> None:
    restrict()
    # Libraries that print must not write among the answers.
    told = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in iter(sys.stdin.buffer.readline, b""):
        asked = json.loads(line)
        data = sys.stdin.buffer.read(asked["size"])
        if len(data) < asked["size"]:
            return
        told.write(json.dumps(answer(asked["kind"], data, asked["out"], asked["most_s"])).encode() + b"\n")


if __name__ == "__main__":
    main()
