"""Texts in parts that can be said one after the other."""

from __future__ import annotations

import re

# Characters that a part has at most, and that a sentence has at least to stand alone.
LONGEST = 300
SHORTEST = 12
_END = re.compile(r"(?<=[.!?…])(?=\s)|(?<=[.!?…][\"'”’)\]])(?=\s)|(?<=[。！？])|\n+")
_PAUSE = re.compile(r"(?<=[,;:，；、])\s*|\s+[–—-]\s+")


def sentences(text: str) -> list[str]:
    """In order, each with something to say; together all of ``text`` but the white space between them."""
    found: list[str] = []
    for part in _END.split(text):
        part = part.strip()
        if not part:
            continue
        if found and (len(found[-1]) < SHORTEST or not _says(part)) and len(found[-1]) + len(part) < LONGEST:
            found[-1] += f" {part}"
        else:
            found.append(part)
    return [piece for part in found for piece in _cut(part) if _says(piece)]


def _says(text: str) -> bool:
    return any(char.isalnum() for char in text)


def _cut(text: str) -> list[str]:
    """Parts of at most `LONGEST` characters: at pauses, else between words, else anywhere."""
    if len(text) <= LONGEST:
        return [text]
    out, rest = [], text
    while len(rest) > LONGEST:
        head = rest[: LONGEST + 1]
        pauses = [match.end() for match in _PAUSE.finditer(head) if LONGEST // 3 < match.end() <= LONGEST]
        at = pauses[-1] if pauses else head.rfind(" ")
        at = at if at > 0 else LONGEST
        out.append(rest[:at].strip())
        rest = rest[at:].strip()
    return [*out, rest] if rest else out
