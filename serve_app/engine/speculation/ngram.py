"""Drafts by look-up: what followed the last time the same tokens stood there.

Prompt lookup (the idea of "Prompt Lookup Decoding" and of suffix decoding, arXiv 2411.04975): edits of a given file,
tool calls, quotations and loops repeat what is already in the sequence. It costs a few microseconds per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.engine.request import Request
from serve_app.engine.speculation.proposer import Draft

# The longest match counts most: tokens that must agree, and beyond the longest, how many more make a better grade.
SIZES = (8, 4, 2)
LONG = 20
# Tokens indexed per call: a long prompt is taken in over several steps, 4,096 cost about 3 ms.
CHUNK = 4096


class SuffixIndex:
    """Where each run of 8, 4 and 2 tokens stood last in one sequence.

    Runs are known by their hashes; two runs with the same hash are as good as a wrong draft.
    """

    __slots__ = ("_last", "indexed")

    def __init__(self) -> None:
        # hash of the run -> the position behind it
        self._last: dict[int, dict[int, int]] = {size: {} for size in SIZES}
        self.indexed = 0

    def update(self, tokens: list[int]) -> None:
        """Takes in what has been added to ``tokens``, all runs but those that end with the last token."""
        begin, end = self.indexed + 1, min(len(tokens), self.indexed + 1 + CHUNK)
        for size, last in self._last.items():
            for position in range(max(begin, size), end):
                last[hash(tuple(tokens[position - size : position]))] = position
        self.indexed = max(self.indexed, end - 1)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The position behind the latest run that ``tokens`` end with, and its grade (0 to 3); position 0: none."""
        for grade, (size, last) in zip((2, 1, 0), self._last.items(), strict=True):
            position = last.get(hash(tuple(tokens[-size:])), 0)
            if position:
                if grade == 2 and position >= LONG and tokens[position - LONG : position] == tokens[-LONG:]:
                    grade = 3
                return position, grade
        return 0, 0


def continuation(tokens: list[int], position: int, count: int) -> list[int]:
    """``count`` tokens from ``position`` on; where the sequence ends, what was copied so far goes round again."""
    found = tokens[position : position + count]
    while len(found) < count:
        found += found[: count - len(found)]
    return found


@dataclass(slots=True)
class _Followed:
    """One request's index, and whether looking pays: after misses in a row, look-ups rest for a few steps."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    length: int = 0
    said: int = -1
    misses: int = 0
    rest: int = 0

    def rested(self, tokens: list[int], drafted: int, most: int) -> bool:
        """Notes whether the last proposal's first token came true; False while look-ups rest. The next proposal follows
        ``drafted`` tokens of somebody else.
        """
        if self.rest > 0:
            self.rest -= 1
            return False
        if len(tokens) > self.length > 0:
            self.misses = 0 if tokens[self.length] == self.said else self.misses + 1
            if self.misses > 3:
                self.rest = min(1 << (self.misses - 4), most)
        self.length, self.said = len(tokens) + drafted, -1
        return True


class NgramProposer:
    """Continues each request as its own prompt or output went on after the same tokens."""

    name = "ngram"
    free = continues = True
    # Steps that a request without hits rests between look-ups.
    REST = 8

    def __init__(self, *, limit: int = 16) -> None:
        self.limit = limit
        self._followed: dict[str, _Followed] = {}

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        drafts = {}
        for request in requests:
            followed = self._followed.get(request.id)
            if followed is None:
                followed = self._followed[request.id] = _Followed()
            tokens = request.tokens + request.draft if request.draft else request.tokens
            if not followed.rested(request.tokens, len(request.draft), self.REST):
                continue
            followed.index.update(request.tokens)
            position, grade = followed.index.find(tokens)
            if position:
                found = continuation(tokens, position, count)
                drafts[request.id] = Draft(found, grade)
                followed.said = found[0]
        return drafts

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)
