# ruff: noqa: E501 - tables of sentences read better one a line
"""Control tokens and chat template of the pico models.

A turn is `<|role|>content<|end|>`; a conversation starts with `<|begin|>`. Tools are listed in the system
turn, one JSON object a line; the assistant calls one with `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CONTROL = (PAD, BEGIN, END, *ROLES)
TOOL_TAGS = ("<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- macro text(c) -%}
{%- if c is string -%}{{ c }}
{%- elif c is iterable and c is not mapping -%}{%- for p in c -%}{%- if p is string -%}{{ p }}{%- elif p.text is defined -%}{{ p.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set first = 0 -%}
{%- set system = '' -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set first = 1 -%}
{%- set system = text(messages[0].content) -%}
{%- endif -%}
{%- if tools -%}
<|system|>{%- if system -%}{{ system }}{{ '\\n' }}{%- endif -%}{{- 'Tools:' -}}
{%- for t in tools -%}{{- '\\n' -}}{%- if t.function is defined -%}{{ t.function | tojson }}{%- else -%}{{ t | tojson }}{%- endif -%}{%- endfor -%}<|end|>
{%- elif first -%}
<|system|>{{ system }}<|end|>
{%- endif -%}
{%- for m in messages[first:] -%}
{%- if m.role == 'assistant' -%}
<|assistant|>{{ text(m.content) }}
{%- for c in m.tool_calls or [] -%}
{%- set f = c.function if c.function is defined else c -%}
<tool_call>{{- '{"name": "' ~ f.name ~ '", "arguments": ' -}}
{%- if f.arguments is string -%}{{ f.arguments }}{%- else -%}{{ f.arguments | tojson }}{%- endif -%}{{- '}' -}}</tool_call>
{%- endfor -%}<|end|>
{%- elif m.role == 'tool' -%}
<|tool|>{{ text(m.content) }}<|end|>
{%- elif m.role == 'user' -%}
<|user|>{{ text(m.content) }}<|end|>
{%- else -%}
<|system|>{{ text(m.content) }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    return env


_COMPILED = _environment().from_string(CHAT_TEMPLATE)


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, ask: bool = False) -> str:
    """The text of a conversation; `ask` adds the opening of the assistant's next turn."""
    return _COMPILED.render(messages=messages, tools=tools, bos_token=BEGIN, add_generation_prompt=ask)
