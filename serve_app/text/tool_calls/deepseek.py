"""DeepSeek's calls since V3.2, a section of them behind whatever text there is::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 names the section ``tool_calls``. The bars are U+FF5C. Formats: ``encoding`` in the models' repositories
(huggingface.co/deepseek-ai).
"""

from __future__ import annotations

import re

from serve_app.text.tool_calls.base import CallParser, Verdict
from serve_app.text.tool_calls.json_call import NamedCall
from serve_app.text.tool_calls.marked import Marked
from serve_app.text.tool_calls.parameter_call import ParameterCall, ParameterForm

DSML = "｜DSML｜"
SECTIONS = ("function_calls>", "tool_calls>")
INVOKE, INVOKE_END = 'invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = 'parameter name="', f"</{DSML}parameter>"
TEXT_FOLLOWS, JSON_FOLLOWS = '" string="true">', '" string="false">'
_SECTION_ENDS = tuple(f"</{DSML}{section}" for section in SECTIONS)
_NAME = re.compile(r'([\w.:/-]{1,128})">\s*')
_MAYBE_NAME = re.compile(r'[\w.:/-]{0,128}"?')
_OPEN = re.compile(rf'\s*<{DSML}{PARAMETER}(?P<key>[^"<]{{1,256}})"(?: string="(?P<string>true|false)")?>')


class DeepSeek(Marked):
    """See above. Arguments may be one JSON object as well, and a model may leave out the marks of the section."""

    marker = f"<{DSML}"
    # The one control token that the marks are made with.
    markers = (DSML,)
    form = ParameterForm(_OPEN, f"<{DSML}{PARAMETER}", PARAMETER_END, INVOKE_END)

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        undecided = Verdict.NO_CALL if final else Verdict.MORE
        call = body
        for section in SECTIONS:
            if section.startswith(body):
                return None, 0, undecided
            if body.startswith(section):
                call = body[len(section) :].lstrip()
                if self.marker.startswith(call):
                    return None, 0, undecided
                if not call.startswith(self.marker):
                    return None, 0, Verdict.NO_CALL
                call = call[len(self.marker) :]
        head, rest = call[: len(INVOKE)], call[len(INVOKE) :]
        found = _NAME.match(rest) if head == INVOKE else None
        if found is None:
            possible = INVOKE.startswith(head) and _MAYBE_NAME.fullmatch(rest) is not None
            return None, 0, undecided if possible else Verdict.NO_CALL
        if self._known is not None and found[1] not in self._known:
            return None, 0, Verdict.NO_CALL
        if found.end() == len(rest):
            return None, 0, undecided
        lead = len(body) - len(rest) + found.end()
        if rest[found.end()] == "{":
            return NamedCall(self._calls, found[1]), lead, Verdict.MORE
        schema = self._tools.get(found[1], {}).get("parameters")
        return ParameterCall(self._calls, found[1], schema, self.form), lead, Verdict.MORE

    def _close(self, final: bool) -> bool:
        rest = self._held.lstrip().removeprefix(INVOKE_END).lstrip()
        if not final and any(mark.startswith(rest) for mark in (INVOKE_END, *_SECTION_ENDS, self.marker)):
            return False
        self._held = rest[next((len(end) for end in _SECTION_ENDS if rest.startswith(end)), 0) :]
        self._closing = False
        return True
