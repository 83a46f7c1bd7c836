"""What a file may decode to, and what the process that decodes may use."""

from __future__ import annotations

# Pixels of a picture, before anything is decoded: its header says so.
MAX_PIXELS = 64 << 20
MAX_SIDE = 32_768
# Of the longer side to the shorter: some models' processors enlarge the shorter one and keep the shape.
MAX_RATIO = 200
# Seconds of sound.
MAX_SECONDS = 4 * 3600
# What a second of sound takes at least, in the tightest form for speech (Opus at 6 kbit/s), and how many seconds a file
# may hold beyond that: silence packs to almost nothing.
BYTES_PER_SECOND = 750
SECONDS_MORE = 30
# Samples per second of what is decoded; all recognisers of transformers hear 16 kHz.
SAMPLE_RATE = 16_000
# Of the process: bytes of its address space (a picture of MAX_PIXELS with room to convert it), of the file that it
# writes, and seconds of a processor until it is replaced by another.
MEMORY_BYTES = 3 << 30
FILE_BYTES = MAX_SECONDS * SAMPLE_RATE * 2
CPU_S = 1800
# Seconds for one file: a good one takes a small part of that.
IMAGE_S = 15.0
AUDIO_S = 300.0


def longest_s(size: int) -> int:
    """Seconds of sound that a file of ``size`` bytes may hold; so much is reserved of its caller's limits."""
    return min(MAX_SECONDS, SECONDS_MORE + size // BYTES_PER_SECOND)
