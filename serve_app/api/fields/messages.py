"""Conversations and tools, normalised: every tool and tool call in OpenAI's shape, contents as `content` has them."""

from __future__ import annotations

import re
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.body import json_type
from serve_app.api.fields.content import TEXT_ONLY, PartKind, parse_content
from serve_app.api.fields.values import objects, refuse, text

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "user", "assistant", "tool")
# `developer` is what newer OpenAI clients call the system role.
_ROLE_NAMES = {**{role: role for role in ROLES}, "developer": "system"}
TOOL_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
_TOOL_NAME = re.compile(TOOL_NAME)


def parse_messages(value: Any, takes: frozenset[PartKind] = TEXT_ONLY) -> list[dict[str, Any]]:
    """The messages of a conversation, checked and copied; unknown keys are left out. ``takes``: the kinds of content
    parts that the model reads."""
    messages = objects(value, "messages", limit=MAX_MESSAGES)
    if not messages:
        raise InvalidInput("messages must hold at least one message.", param="messages")
    return [_message(message, f"messages[{i}]", takes) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, takes: frozenset[PartKind]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLE_NAMES:
        given = f'"{role[:32]}"' if isinstance(role, str) else json_type(role)
        names = ", ".join(f'"{name}"' for name in _ROLE_NAMES)
        raise InvalidInput(f"{where}.role must be one of {names}, not {given}.", param=f"{where}.role")
    out: dict[str, Any] = {"role": _ROLE_NAMES[role], "content": None}
    calls = message.get("tool_calls")
    if calls:
        if out["role"] != "assistant":
            raise InvalidInput(f"{where}: only assistant messages have tool_calls.", param=f"{where}.tool_calls")
        items = objects(calls, f"{where}.tool_calls", limit=MAX_TOOLS)
        out["tool_calls"] = [_history_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(items)]
    content = message.get("content")
    if content is not None:
        out["content"] = parse_content(content, f"{where}.content", takes)
    elif out["role"] == "tool":
        out["content"] = ""
    elif out["role"] != "assistant":
        raise InvalidInput(f"{where}.content is missing; send a string.", param=f"{where}.content")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            out[key] = text(message[key], f"{where}.{key}")
    if "reasoning_content" not in out and isinstance(message.get("reasoning"), str):
        out["reasoning_content"] = message["reasoning"]
    return out


def _history_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call of an earlier turn; ids may be missing, as native clients have none."""
    function = call.get("function")
    source = call if function is None else function
    if not isinstance(source, dict):
        raise refuse(f"{where}.function", "an object", source)
    name = text(source.get("name"), f"{where}.function.name", limit=128)
    arguments = source.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    out = {
        "type": "function",
        "function": {"name": name, "arguments": text(arguments, f"{where}.function.arguments")},
    }
    if call.get("id") is not None:
        out["id"] = text(call["id"], f"{where}.id", limit=256)
    return out


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Flat ``{name, description, parameters}`` or wrapped ``{"type": "function", "function": {...}}``, as the
    wrapped form."""
    if value is None or value == []:
        return None
    tools = []
    for i, tool in enumerate(objects(value, "tools", limit=MAX_TOOLS)):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise InvalidInput(
                f'{where}.type must be "function"; other tools are not supported.', param=f"{where}.type"
            )
        source = tool.get("function", tool)
        if not isinstance(source, dict):
            raise refuse(f"{where}.function", "an object", source)
        name = text(source.get("name"), f"{where}.name")
        if not _TOOL_NAME.fullmatch(name):
            raise InvalidInput(
                f"{where}.name must be 1 to 128 letters, digits or any of _ . : / -", param=f"{where}.name"
            )
        function: dict[str, Any] = {"name": name}
        if source.get("description") is not None:
            function["description"] = text(source["description"], f"{where}.description")
        parameters = source.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise refuse(f"{where}.parameters", "a JSON schema (an object)", parameters)
        function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": function})
    return tools


def strict_tools(value: Any) -> tuple[str, ...]:
    """The names of those ``tools``, in either form, that say ``"strict": true``."""
    found = []
    for tool in value if isinstance(value, list) else ():
        source = tool.get("function", tool)
        if tool.get("strict") is True or source.get("strict") is True:
            found.append(source["name"])
    return tuple(found)


def parse_tool_choice(value: Any, tools: list[dict[str, Any]] | None) -> str | dict[str, Any] | None:
    """``"auto"``, ``"none"``, ``"required"`` (also for ``"any"``), or in OpenAI's shape the tool that must be called or
    the ``allowed_tools``; ``None`` where nothing is said."""
    if value is None or value in ("auto", "none"):
        return value
    if isinstance(value, dict) and value.get("type") in ("auto", "none", "required", "any"):
        return parse_tool_choice(value["type"], tools)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools", value), tools)
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("function", value).get("name") if isinstance(value.get("function", value), dict) else None
        return {"type": "function", "function": {"name": _offered(name, "tool_choice", tools)}}
    if value in ("required", "any"):
        if not tools:
            raise InvalidInput("tool_choice forces a tool call, but there are no tools.", param="tool_choice")
        return "required"
    forms = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    raise InvalidInput(f"tool_choice must be {forms}.", param="tool_choice")


def _allowed_tools(value: Any, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("mode", "auto") not in ("auto", "required"):
        raise InvalidInput('tool_choice.allowed_tools must be {"mode": "auto" | "required", "tools": [...]}.',
                           param="tool_choice")  # fmt: skip
    names = []
    for item in objects(value.get("tools"), "tool_choice.tools", limit=MAX_TOOLS):
        source = item.get("function", item)
        name = source.get("name") if isinstance(source, dict) else None
        names.append({"type": "function", "function": {"name": _offered(name, "tool_choice.tools", tools)}})
    if not names:
        raise InvalidInput("tool_choice.tools must name at least one tool.", param="tool_choice")
    return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode", "auto"), "tools": names}}


def _offered(name: Any, where: str, tools: list[dict[str, Any]] | None) -> str:
    """``name`` if it is one of ``tools``."""
    if not tools:
        raise InvalidInput("tool_choice forces a tool call, but there are no tools.", param="tool_choice")
    if not isinstance(name, str):
        raise refuse(f"{where}.function.name", "the name of one of the tools", name)
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidInput(f"{where} names {name[:64]!r}, which is none of the tools.", param="tool_choice")
    return name
