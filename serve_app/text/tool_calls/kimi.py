"""Kimi's calls, a section of them behind whatever text there is::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
    <|tool_calls_section_end|>

The number counts a conversation's calls (github.com/MoonshotAI/Kimi-K2, ``docs/tool_call_guidance.md``).
"""

from __future__ import annotations

import re
from typing import Any

from serve_app.text.tool_calls.base import CallParser, Verdict
from serve_app.text.tool_calls.json_call import NamedCall
from serve_app.text.tool_calls.marked import Marked

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(
    rf"\s*{re.escape(CALL)}\s*(?:functions\.)?([\w.:/-]{{1,128}}?)(?::\d{{1,6}})?\s*{re.escape(ARGUMENTS)}"
)
# Longer than that no marks, name and number can be together.
_LONGEST = 256


class Kimi(Marked):
    """See above. A model may leave out the marks at the end."""

    marker = SECTION
    markers = (SECTION, CALL, ARGUMENTS, END, SECTION_END)

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        found = _HEAD.match(body)
        if found is not None and (self._known is None or found[1] in self._known):
            return NamedCall(self._calls, found[1]), found.end(), Verdict.MORE
        possible = found is None and not final and ARGUMENTS not in body and len(body) < _LONGEST
        return None, 0, Verdict.MORE if possible else Verdict.NO_CALL

    def _close(self, final: bool) -> bool:
        rest = self._held.lstrip().removeprefix(END).lstrip()
        if rest.startswith(CALL):
            # The next of the section: as if it began anew.
            self._held = self.marker + rest
        elif rest.startswith(SECTION_END):
            self._held = rest[len(SECTION_END) :]
        elif not final and any(mark.startswith(rest) for mark in (CALL, END, SECTION_END)):
            return False
        else:
            self._held = rest
        self._closing = False
        return True


def number_calls(messages: list[dict[str, Any]]) -> None:
    """Gives the calls of a conversation, and their results, the ids by which Kimi tells them: ``functions.f:0``. Its
    chat template shows nothing else of a call's name.
    """
    named: dict[str, str] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            own, count = f"functions.{call['function']['name']}:{count}", count + 1
            named[call.get("id") or own] = own
            call["id"] = own
        if message.get("tool_call_id") in named:
            message["tool_call_id"] = named[message["tool_call_id"]]
