"""Chat templates: the Jinja of a model folder, rendered like transformers does, in a sandbox with limits of
time and size.

Source of the environment (extensions, filters, whitespace): Hugging Face's chat template documentation. A
template belongs to the model, yet models are downloaded: SGLang CVE-2026-5760 is a template that ran outside
a sandbox.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_SECONDS = 2.0
MAX_CHARS = 32 * 1024 * 1024
MAX_REPEAT = 1_000_000


class TemplateFailed(ValueError):
    """A template refused the conversation or broke a limit; the message is the template's own and meant for
    people."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; when serving it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Checks the clock at every call and attribute, and refuses products that would fill the memory."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.clock = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def check_clock(self) -> None:
        if time.monotonic() > getattr(self.clock, "deadline", float("inf")):
            raise TemplateFailed(f"The chat template took longer than {MAX_SECONDS:g} seconds.")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, (str, list, tuple))
                and isinstance(count, int)
                and len(sequence) * count > MAX_REPEAT
            ):
                raise SecurityError("a repeated sequence would be too long")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateFailed(str(message)[:500])


class ChatTemplate:
    """One compiled template and the special tokens it may name (``bos_token`` and so on)."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None):
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(
                f"The chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """The conversation as the model's prompt. Raises `TemplateFailed`."""
        variables = {
            **self.special_tokens,
            **switches,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._environment
        environment.clock.deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                if size > MAX_CHARS:
                    raise TemplateFailed(f"The chat template wrote more than {MAX_CHARS} characters.")
                environment.check_clock()
                pieces.append(piece)
        except TemplateFailed:
            raise
        except SecurityError as error:
            raise TemplateFailed(f"The chat template was stopped: {error}") from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise TemplateFailed(
                f"The chat template cannot render this conversation ({type(error).__name__})."
            ) from error
        finally:
            environment.clock.deadline = float("inf")
        return "".join(pieces)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string, keys included, passed through ``change``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
