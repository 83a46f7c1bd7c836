"""What a model says to itself before it answers, told apart from the answer; a record's ``reasoning_parser`` names the
family.

``qwen3``, ``deepseek_r1``  <think> ... </think>      Qwen3, QwQ, DeepSeek-R1 and its distillations, GLM
``mistral``                 [THINK] ... [/THINK]      Magistral
``harmony``                 channels of messages      gpt-oss (github.com/openai/harmony)

Some chat templates write the opening mark themselves, so that the answer begins behind it: the prompt tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from serve_app.text.tool_calls.base import prefix_at_end


@dataclass(slots=True, frozen=True)
class Marks:
    """``direct``: what stands before an answer without reasoning, if anything does."""

    start: str
    end: str
    direct: str = ""

    @property
    def tokens(self) -> list[str]:
        """Texts of control tokens in them."""
        return list(dict.fromkeys(each for mark in (self.start, self.end, self.direct) for each in pieces(mark)))


def pieces(mark: str) -> list[str]:
    """The control tokens of a mark and what is between them."""
    return [each for each in _CONTROL.split(mark) if each]


_CONTROL = re.compile(r"(<\|\w+\|>)")
_THINK = Marks("<think>", "</think>")
_FINAL = "<|channel|>final<|message|>"
MARKS: dict[str, Marks] = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "harmony": Marks("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{_FINAL}", _FINAL),
}
# Characters at the end of a prompt in which an opening mark and white space behind it must lie.
TAIL_CHARS = 32


def opens(prompt_tail: str, marks: Marks) -> bool:
    """Whether a prompt that ends with ``prompt_tail`` has the model begin inside its reasoning."""
    return prompt_tail.rstrip().endswith(marks.start)


class ReasoningSplitter:
    """Splits a stream of text into reasoning, which can only come first, and the answer.

    White space around the marks belongs to neither. ``ended_at``: how many characters of all text were reasoning and
    marks; None while that goes on. ``call``: what begins a tool call, which ends reasoning as well where one of
    ``heads`` follows, white space before it aside: a model that thinks about calls may name the mark alone.
    """

    __slots__ = ("_call", "_heads", "_held", "_inside", "_marks", "_read", "_seen_text", "ended_at")

    def __init__(self, marks: Marks, *, inside: bool = False, call: str = "", heads: Collection[str] = ("",)) -> None:
        self._marks = marks
        self._call = call
        self._heads = heads
        self._inside = inside
        self._held = ""
        self._read = 0
        self._seen_text = False
        self.ended_at: int | None = None

    @property
    def decided(self) -> bool:
        """Whether it is known which of the two the text read so far is."""
        return self._inside or self.ended_at is not None

    def covers(self, end: int) -> bool:
        """Whether text that ends after ``end`` characters was reasoning; to be asked once ``decided``."""
        return self.ended_at is None or 0 < end <= self.ended_at

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """(reasoning, answer): what became certain with ``text``."""
        if self.ended_at is not None:
            return "", text
        self._held += text
        self._read += len(text)
        if not self._inside and not self._enter(final):
            return "", self._leave("") if self.ended_at is not None else ""
        if not self._inside:
            return "", ""
        at = self._held.find(self._marks.end)
        called, certain = self._find_call(final) if self._call else (-1, True)
        if called >= 0 and certain and not 0 <= at < called:
            thought, answer = self._held[:called].rstrip(), self._held[called:]
            return self._thought(thought), self._leave(answer)
        if at >= 0:
            thought, rest = self._held[:at], self._held[at + len(self._marks.end) :]
            answer = rest.lstrip()
            if not answer and not final:
                # White space behind the mark: wait for what it belongs to.
                self._held = self._held[at:]
                return self._thought(thought.rstrip()), ""
            return self._thought(thought.rstrip()), self._leave(answer)
        keep = 0 if final else max(prefix_at_end(self._held, mark) for mark in (self._marks.end, self._call))
        told = self._held[: called if called >= 0 else len(self._held) - keep].rstrip()
        self._held = "" if final else self._held[len(told) :]
        return self._thought(told), ""

    def _find_call(self, final: bool) -> tuple[int, bool]:
        """Where a call begins, or may begin as far as can be told; -1 for nowhere yet."""
        at = self._held.find(self._call)
        while at >= 0:
            behind = self._held[at + len(self._call) :].lstrip()
            if any(behind.startswith(head) for head in self._heads):
                return at, True
            if not final and any(head.startswith(behind) for head in self._heads):
                return at, False
            at = self._held.find(self._call, at + 1)
        return -1, True

    def _enter(self, final: bool) -> bool:
        """Looks for the opening mark at the very beginning; once there is none, the rest is the answer."""
        stripped = self._held.lstrip()
        if stripped.startswith(self._marks.start):
            self._inside = True
            self._held = stripped[len(self._marks.start) :]
            return True
        if final or not self._marks.start.startswith(stripped):
            self.ended_at = self._read - len(self._held)
        return False

    def _thought(self, text: str) -> str:
        text = text if self._seen_text else text.lstrip()
        self._seen_text = self._seen_text or bool(text)
        return text

    def _leave(self, answer: str) -> str:
        if self.ended_at is None:
            self.ended_at = self._read - len(answer)
            self._held = ""
            return answer
        answer, self._held = self._held, ""
        return answer
