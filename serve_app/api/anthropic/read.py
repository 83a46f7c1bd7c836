"""Reading the Anthropic dialect: the body of `POST /v1/messages` and of `/v1/messages/count_tokens`.

A conversation becomes the OpenAI-shaped messages that everything behind the dialects speaks: a user turn with tool
results becomes `tool` messages and what else it says, an assistant turn with tool_use blocks one message with
``tool_calls``. Fields and blocks: Anthropic's Messages API reference.
"""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.body import as_object, json_type
from serve_app.api.fields.content import MAX_PARTS, Content, PartKind, content_text, part_kind, text_part
from serve_app.api.fields.formats import parse_response_format
from serve_app.api.fields.lora import parse_lora
from serve_app.api.fields.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    parse_messages,
    parse_tool_choice,
    parse_tools,
    strict_tools,
)
from serve_app.api.fields.sampling import parse_sampling, parse_stop
from serve_app.api.fields.thinking import switched
from serve_app.api.fields.turn import CONTINUED
from serve_app.api.fields.values import boolean, objects, refuse, string, text
from serve_app.api.types import GenerateRequest, ModelLimits


def parse_messages_request(body: bytes | dict[str, Any], limits: ModelLimits | None = None) -> GenerateRequest:
    """`POST /v1/messages`. ``max_tokens`` is required there, so clients send numbers that suit other models: one that
    goes beyond the context window is shortened to fit, and the answer says ``max_tokens`` where that was felt."""
    body = as_object(body)
    if body.get("max_tokens") is None:
        raise InvalidInput("max_tokens is missing; send the most tokens to generate.", param="max_tokens")
    return _parse(body, limits)


def parse_count(body: bytes | dict[str, Any], limits: ModelLimits | None = None) -> GenerateRequest:
    """`POST /v1/messages/count_tokens`: the same conversation, of which only the prompt matters."""
    body = as_object(body)
    return _parse({**body, "max_tokens": 1 if body.get("max_tokens") is None else body["max_tokens"]}, limits)


def _parse(body: dict[str, Any], limits: ModelLimits | None) -> GenerateRequest:
    model = string(body, "model", limit=512)
    if not model:
        raise InvalidInput("model is missing; name one of GET /v1/models.", param="model")
    if body.get("mcp_servers"):
        raise InvalidInput("mcp_servers is not supported; leave the field out.", param="mcp_servers")
    # Nothing to generate: the prompt is computed, so that the next request finds it in the cache.
    prompt_only = body.get("max_tokens") == 0 and not isinstance(body["max_tokens"], bool)
    sampling, _ = parse_sampling(
        {
            **{name: body.get(name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")},
            **({"max_tokens": 1} if prompt_only else {}),
        },
        limits or ModelLimits(),
    )
    tools = _tools(body.get("tools"))
    messages = _conversation(body, (limits or ModelLimits()).takes)
    return GenerateRequest(
        model=model,
        lora=parse_lora(body, model, limits),
        messages=messages,
        prompt=None,
        raw=False,
        sampling=sampling,
        stop=parse_stop(body.get("stop_sequences")),
        stream=bool(boolean(body, "stream")),
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        max_tokens_given=False,
        template_kwargs={**_thinking(body.get("thinking")), **(CONTINUED if _goes_on(messages[-1]) else {})},
        prompt_only=prompt_only,
        show_reasoning=_thinks(body.get("thinking")),
        parallel_tool_calls=not _one_call(body.get("tool_choice")),
        strict_tools=strict_tools(body.get("tools")),
        answer_format=parse_response_format(_output_format(body), "output_format"),
        **_asked(body),
    )


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's ``metadata.user_id`` is all it has to say whose requests belong together."""
    asked = parse_asked(body)
    return {**asked, "session": asked["session"] or asked["metadata"].get("user_id") or None}


def _conversation(body: dict[str, Any], takes: frozenset[PartKind]) -> list[dict[str, Any]]:
    turns = objects(body.get("messages"), "messages", limit=MAX_MESSAGES)
    if not turns:
        raise InvalidInput("messages must hold at least one message.", param="messages")
    turns = _joined(turns)
    out: list[dict[str, Any]] = []
    if body.get("system") not in (None, "", []):
        out.append({"role": "system", "content": _plain(body["system"], "system")})
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        role, content = turn.get("role"), turn.get("content")
        if role not in ("user", "assistant", "system"):
            given = f'"{role[:32]}"' if isinstance(role, str) else json_type(role)
            raise InvalidInput(f'{where}.role must be "user" or "assistant", not {given}.', param=f"{where}.role")
        if isinstance(content, str):
            out.append({"role": role, "content": content})
        elif role == "assistant":
            out.append(_assistant(_blocks(content, f"{where}.content"), f"{where}.content"))
        else:
            out.extend(_user(role, _blocks(content, f"{where}.content"), f"{where}.content", takes))
    return parse_messages(out, takes)


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``turns`` with those of one role that follow each other made one, as Anthropic does."""
    out: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        last = out[-1] if out and role in ("user", "assistant") and out[-1].get("role") == role else None
        if last is None or not all(isinstance(part, (str, list)) for part in (content, last.get("content"))):
            out.append(turn)
        else:
            out[-1] = {"role": role, "content": [*_listed(last["content"]), *_listed(content)]}
    return out


def _listed(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [text_part(content)]


def _goes_on(last: dict[str, Any]) -> bool:
    """Whether the ``last`` message is an assistant's words, with which the answer goes on."""
    return last["role"] == "assistant" and bool(content_text(last["content"])) and not last.get("tool_calls")


def _blocks(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refuse(where, "a string or an array of content blocks", value)
    return objects(value, where, limit=MAX_PARTS)


def _plain(value: Any, where: str) -> Content:
    """A string, or an array of text blocks."""
    if isinstance(value, str):
        return text(value, where)
    pieces = []
    for i, block in enumerate(_blocks(value, where)):
        if block.get("type") != "text":
            raise _unsupported(block, f"{where}[{i}]", "text")
        pieces.append(text_part(text(block.get("text"), f"{where}[{i}].text")))
    return pieces


def _user(role: str, blocks: list[dict[str, Any]], where: str, takes: frozenset[PartKind]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        kind = part_kind(block.get("type"))
        if block.get("type") == "text":
            said.append(text_part(text(block.get("text"), f"{here}.text")))
        elif kind is not None and kind in takes - {"text"} and role == "user":
            said.append(block)
        elif block.get("type") == "tool_result" and role == "user":
            result = block.get("content")
            out.append(
                {
                    "role": "tool",
                    "tool_call_id": text(block.get("tool_use_id"), f"{here}.tool_use_id", limit=256),
                    "content": "" if result is None else _plain(result, f"{here}.content"),
                }
            )
            boolean(block, "is_error")
        else:
            raise _unsupported(block, here, "text and tool_result" if role == "user" else "text")
    if said or not out:
        out.append({"role": role, "content": said})
    return out


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        kind = block.get("type")
        if kind == "text":
            said.append(text_part(text(block.get("text"), f"{here}.text")))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise refuse(f"{here}.input", "an object", arguments)
            function = {"name": text(block.get("name"), f"{here}.name"), "arguments": orjson.dumps(arguments).decode()}
            calls.append(
                {"id": text(block.get("id"), f"{here}.id", limit=256), "type": "function", "function": function}
            )
        elif kind == "thinking":
            thought.append(text(block.get("thinking"), f"{here}.thinking"))
        elif kind != "redacted_thinking":
            raise _unsupported(block, here, "text and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if any(thought):
        # Templates decide which turns' reasoning the model sees again.
        message["reasoning_content"] = "\n".join(thought)
    return {**message, "tool_calls": calls} if calls else message


def _unsupported(block: dict[str, Any], where: str, known: str) -> InvalidInput:
    kind = block.get("type")
    named = f'"{kind[:32]}"' if isinstance(kind, str) else json_type(kind)
    return InvalidInput(f"{where}: blocks of type {named} are not supported here; send {known}.", param=f"{where}.type")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    tools = []
    for i, tool in enumerate(objects(value, "tools", limit=MAX_TOOLS)):
        if tool.get("type") not in (None, "custom"):
            message = f"tools[{i}]: tools that run on the server are not supported; send tools with an input_schema."
            raise InvalidInput(message, param=f"tools[{i}].type")
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise refuse(f"tools[{i}].input_schema", "a JSON schema (an object)", schema)
        tools.append({"name": tool.get("name"), "description": tool.get("description"), "parameters": schema})
    return parse_tools(tools)


def _tool_choice(value: Any, tools: list[dict[str, Any]] | None) -> str | dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse("tool_choice", 'an object such as {"type": "auto"}', value)
    kind = value.get("type")
    if kind == "tool":
        name = text(value.get("name"), "tool_choice.name", limit=128)
        return parse_tool_choice({"type": "function", "function": {"name": name}}, tools)
    if kind not in ("auto", "none", "any"):
        raise InvalidInput('tool_choice.type must be "auto", "none", "any" or "tool".', param="tool_choice")
    return parse_tool_choice("required" if kind == "any" else kind, tools)


def _output_format(body: dict[str, Any]) -> Any:
    """The answer's format under its older and its newer name."""
    config = body.get("output_config")
    if config is not None and not isinstance(config, dict):
        raise refuse("output_config", "an object", config)
    return body.get("output_format") or (config or {}).get("format")


def _thinking(value: Any) -> dict[str, Any]:
    """``thinking`` as the switches that templates of reasoning models know. In this dialect models do not think unless
    they are asked to: clients read the first block as the answer."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is not None and kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidInput('thinking must be {"type": "enabled"} or {"type": "disabled"}.', param="thinking")
    return {} if kind == "adaptive" else switched(kind == "enabled")


def _thinks(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") != "disabled"


def _one_call(choice: Any) -> bool:
    return isinstance(choice, dict) and bool(boolean(choice, "disable_parallel_tool_use"))
