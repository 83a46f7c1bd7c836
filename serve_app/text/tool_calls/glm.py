"""GLM's calls, one after another behind whatever text there is, with line breaks between the parts (4.5, 4.6) or
without (4.7 and later)::

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

Values are strings as they are, or JSON; the tool's schema says which. Format: the models' chat templates
(huggingface.co/zai-org).
"""

from __future__ import annotations

import re

from serve_app.text.tool_calls.base import CallParser, Verdict
from serve_app.text.tool_calls.marked import Marked
from serve_app.text.tool_calls.parameter_call import ParameterCall, ParameterForm

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s{0,16}([\w.:/-]{1,128})\s{0,16}(?=<arg_key>|</tool_call>)")
_MAYBE_NAME = re.compile(r"\s{0,16}([\w.:/-]{0,128})\s{0,16}(<[\w/]*)?")
_OPEN = re.compile(rf"\s*{KEY}\s{{0,16}}(?P<key>[^<]{{1,256}}?)\s{{0,16}}{KEY_END}\s{{0,16}}{VALUE}")


class Glm(Marked):
    """See above. A model may leave out the mark at the end."""

    marker, close = "<tool_call>", "</tool_call>"
    markers = (marker, close, KEY, KEY_END, VALUE, VALUE_END)
    form = ParameterForm(_OPEN, KEY, VALUE_END, close)

    def _open(self, body: str, final: bool) -> tuple[CallParser | None, int, Verdict]:
        found = _NAME.match(body)
        if found is not None and (self._known is None or found[1] in self._known):
            schema = self._tools.get(found[1], {}).get("parameters")
            return ParameterCall(self._calls, found[1], schema, self.form), found.end(), Verdict.MORE
        maybe = _MAYBE_NAME.fullmatch(body) if found is None and not final else None
        possible = maybe is not None and (
            any(mark.startswith(maybe[2] or "<") for mark in (KEY, self.close))
            and (self._known is None or any(name.startswith(maybe[1]) for name in self._known))
        )
        return None, 0, Verdict.MORE if possible else Verdict.NO_CALL
