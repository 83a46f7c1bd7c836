"""gpt-oss's channels of messages (github.com/openai/harmony): what is in the channel ``final`` is the answer, and what
was said before in others is reasoning::

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes

A header may name more than its channel, as a recipient or a format; none of it is text.
"""

from __future__ import annotations

import re

from serve_app.text.reasoning import MARKS, ReasoningSplitter
from serve_app.text.tool_calls.base import prefix_at_end

_OPENING = "<|channel|>"
_ENDING = "<|end|>"
# What may stand in a header beside control tokens is short; a longer one is none.
LONGEST = 200
_HEADER = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>[^<]*)?<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)


class HarmonySplitter(ReasoningSplitter):
    """As :class:`ReasoningSplitter`, whichever messages come before the answer."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(MARKS["harmony"])

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        if self.ended_at is not None:
            return "", text
        self._held += text
        self._read += len(text)
        thoughts = ""
        while self.ended_at is None:
            mark = _ENDING if self._inside else _OPENING
            at = self._held.find(mark) if self._inside else len(self._held) - len(self._held.lstrip())
            if self._inside and at < 0:
                keep = 0 if final else prefix_at_end(self._held, mark)
                thoughts += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            rest = self._held[at:]
            header = _HEADER.match(rest)
            if header is not None:
                if self._inside:
                    thoughts += self._held[:at] + "\n" * (header[1] != "final")
                self._held = rest[header.end() :]
                self._inside = header[1] != "final"
                if not self._inside:
                    self.ended_at = self._read - len(self._held)
            elif final or len(rest) > LONGEST:
                # Nothing came of it: within reasoning a mark is dropped, and text without a header is the answer.
                if self._inside:
                    thoughts += self._held[:at]
                    self._held = rest[len(mark) :]
                    if not final:
                        continue
                    thoughts, self._held = thoughts + self._held, ""
                    break
                self.ended_at = self._read - len(self._held)
            elif not self._inside and rest and not (rest.startswith(mark) or mark.startswith(rest)):
                self.ended_at = self._read - len(self._held)
            else:
                thoughts += self._held[:at] if self._inside else ""
                self._held = rest if self._inside else self._held
                break
        answer = ""
        if self.ended_at is not None:
            answer, self._held = self._held, ""
        return self._thought(thoughts), answer
