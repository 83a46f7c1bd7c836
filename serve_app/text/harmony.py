"""gpt-oss's channels of messages (github.com/openai/harmony): what is in the channel ``final`` is the answer, and what
was said before in others is reasoning::

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes

A header may name more than its channel, as a recipient or a format; none of it is text. Messages to functions are
reasoning where the request offers no tools.
"""

from __future__ import annotations

from collections.abc import Collection

from serve_app.text.reasoning import MARKS, ReasoningSplitter
from serve_app.text.tool_calls.base import prefix_at_end
from serve_app.text.tool_calls.harmony import HEADER, LONGEST, may_open, recipient

_ENDING = "<|end|>"
_FINAL = "final"


class HarmonySplitter(ReasoningSplitter):
    """As :class:`ReasoningSplitter`, whichever messages come before the answer. A message to a function of
    ``calls`` is one, header and all, which :class:`~serve_app.text.tool_calls.harmony.Harmony` reads.
    """

    __slots__ = ("_called",)

    def __init__(self, calls: Collection[str] = ()) -> None:
        super().__init__(MARKS["harmony"])
        self._called = calls

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        if self.ended_at is not None:
            return "", text
        self._held += text
        self._read += len(text)
        thoughts = ""
        while self.ended_at is None and (thought := self._go_on(final)) is not None:
            thoughts += thought
        answer = ""
        if self.ended_at is not None:
            answer, self._held = self._held, ""
        return self._thought(thoughts), answer

    def _go_on(self, final: bool) -> str | None:
        """The reasoning up to the next header, which is read; None where more text is needed."""
        if self._inside and _ENDING not in self._held:
            keep = 0 if final else prefix_at_end(self._held, _ENDING)
            certain = self._held[: len(self._held) - keep]
            self._held = self._held[len(certain) :]
            return certain or None
        at = self._held.index(_ENDING) if self._inside else len(self._held) - len(self._held.lstrip())
        thought, rest = self._held[:at] if self._inside else "", self._held[at:]
        header = HEADER.match(rest, 0, LONGEST)
        if header is not None and recipient(header[0]) in self._called:
            self._held, self._inside = rest, False
        elif header is not None:
            goes_on = header[1] != _FINAL
            thought += "\n" * (self._inside and goes_on)
            self._held, self._inside = rest[header.end() :], goes_on
        elif not final and self._may_open(rest):
            self._held = rest if self._inside else self._held
            return thought or None
        elif self._inside:  # a mark and nothing behind it
            self._held = "" if final else rest[len(_ENDING) :]
        if not self._inside:
            self.ended_at = self._read - len(self._held)
        return thought

    def _may_open(self, rest: str) -> bool:
        """Whether ``rest`` may become a header."""
        return len(rest) <= LONGEST and (self._inside or may_open(rest))
