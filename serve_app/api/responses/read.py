"""Reading the OpenAI Responses dialect: the body of `POST /v1/responses`.

A turn is a list of items; they become the OpenAI-shaped messages that everything behind the dialects speaks, calls that
follow each other becoming one assistant message. What went before the turn is the store's business: the gateway puts
it between the instructions and the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import MAX_SESSION_CHARS, parse_asked
from serve_app.api.fields.body import as_object
from serve_app.api.fields.content import MAX_PARTS, TEXT_ONLY, PartKind
from serve_app.api.fields.formats import parse_format, parse_response_format
from serve_app.api.fields.lora import parse_lora
from serve_app.api.fields.messages import (
    MAX_MESSAGES,
    parse_messages,
    parse_tool_choice,
    parse_tools,
    strict_tools,
)
from serve_app.api.fields.ranges import BEST, TOKENS, TOP_LOGPROBS
from serve_app.api.fields.sampling import parse_sampling, parse_stop, refuse_unsupported
from serve_app.api.fields.thinking import parse_thinking
from serve_app.api.fields.values import boolean, objects, refuse, string, text
from serve_app.api.fields.values import choice as choice_of
from serve_app.api.openai.read import model_of
from serve_app.api.responses.compact import summary_message
from serve_app.api.responses.template import parse_reference
from serve_app.api.types import AnswerFormat, GenerateRequest, ModelLimits

LOGPROBS = "message.output_text.logprobs"
ID_PATTERN = "^resp_[0-9a-f]{32}$"
CONVERSATION_PATTERN = "^conv_[0-9a-f]{32}$"


@dataclass(slots=True)
class ResponsesRequest:
    """``generate`` holds the instructions and this turn, not yet what went before it; ``turn`` the turn alone, and
    ``asked`` the same as it was sent.

    ``opening``: messages of a prompt template, which like instructions belong to this request alone. ``shown`` are the
    settings that the answer repeats.
    """

    generate: GenerateRequest
    turn: list[dict[str, Any]]
    asked: Any = None
    opening: list[dict[str, Any]] = field(default_factory=list)
    instructions: str | None = None
    previous: str | None = None
    conversation: str | None = None
    store: bool = True
    background: bool = False
    shown: dict[str, Any] = field(default_factory=dict)

    def messages(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The whole conversation, with what went ``before`` this turn."""
        # Instructions are this request's own: those of earlier turns do not carry over.
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *self.opening, *before, *self.turn]


def parse_responses(
    body: bytes | dict[str, Any],
    limits: ModelLimits | None = None,
    *,
    opening: Sequence[dict[str, str]] = (),
    may_be_empty: bool = False,
) -> ResponsesRequest:
    """Raises `InvalidInput` for what does not fit the schema and for known fields that this server does not honour.

    ``opening``: messages of the template that ``prompt`` names. ``may_be_empty``: an empty ``input`` is no error.
    """
    model, body = model_of(as_object(body))
    prompt = parse_reference(body)
    if opening:
        body = {**body, "input": [] if body.get("input") is None else body["input"]}
    form = _text_format(body)
    answer_format, elsewhere = parse_response_format(form, "text.format"), parse_format(body)
    if answer_format is not None and elsewhere is not None:
        raise InvalidInput(f"text.format and {elsewhere.field} exclude each other.", param=elsewhere.field)
    answer_format = answer_format or elsewhere
    refuse_unsupported(body)
    sampling, given = parse_sampling(
        {**body, **_max_tokens(body)}, (limits or ModelLimits()).of_chat, logprobs=_logprobs(body)
    )
    tools = parse_tools(body.get("tools"))
    strict = strict_tools(body.get("tools"))
    choice = parse_tool_choice(body.get("tool_choice"), tools)
    previous = string(body, "previous_response_id", limit=128)
    if previous is not None:
        check_id(previous, "previous_response_id")
    conversation = _conversation(body)
    if conversation is not None and previous is not None:
        raise InvalidInput("conversation and previous_response_id exclude each other.", param="conversation")
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise refuse("reasoning", "an object", reasoning)
    effort = (reasoning or {}).get("effort")
    parallel = boolean(body, "parallel_tool_calls")
    asked = parse_asked(body)
    background, store = bool(boolean(body, "background")), boolean(body, "store") is not False
    if background and not store:
        raise InvalidInput("background needs store: the response is fetched when it is done.", param="background")
    asked_input, truncation = body.get("input"), choice_of(body, "truncation", ("auto", "disabled")) or "disabled"
    empty = (may_be_empty or bool(opening)) and asked_input == []
    request = ResponsesRequest(
        generate=GenerateRequest(
            model=model,
            lora=parse_lora(body, model, limits),
            messages=None,
            prompt=None,
            raw=False,
            sampling=sampling,
            stop=parse_stop(body.get("stop")),
            stream=bool(boolean(body, "stream")),
            tools=tools,
            tool_choice=choice,
            max_tokens_given=given,
            template_kwargs=parse_thinking(body, effort),
            parallel_tool_calls=parallel is not False,
            strict_tools=strict,
            answer_format=answer_format,
            drop_oldest=truncation == "auto",
            **asked,
        ),
        turn=[] if empty else parse_input(asked_input, (limits or ModelLimits()).takes),
        asked=asked_input,
        opening=parse_messages(list(opening)) if opening else [],
        instructions=string(body, "instructions"),
        previous=previous,
        conversation=conversation,
        store=store,
        background=background,
        shown={
            "metadata": asked["metadata"],
            "parallel_tool_calls": parallel is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": TOP_LOGPROBS.read(body, "top_logprobs") or 0,
            "max_output_tokens": sampling.max_tokens if given else None,
            # Counts calls of tools that run on the server, of which there are none.
            "max_tool_calls": BEST.read(body, "max_tool_calls"),
            "background": background,
            "service_tier": asked["service_tier"] or "default",
            "user": string(body, "user"),
            "safety_identifier": string(body, "safety_identifier", limit=MAX_SESSION_CHARS),
            "prompt_cache_key": string(body, "prompt_cache_key", limit=MAX_SESSION_CHARS),
            "tool_choice": _shown_choice(choice),
            "tools": [_shown_tool(tool["function"], strict) for tool in tools or ()],
            "reasoning": {"effort": effort, "summary": None},
            "truncation": truncation,
            "conversation": None if conversation is None else {"id": conversation},
            "prompt": None if prompt is None else prompt.shown,
            "text": {"format": _shown_format(form, answer_format)},
        },
    )
    request.generate.messages = request.messages([])
    return request


def _shown_tool(function: dict[str, Any], strict: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "function", "strict": function["name"] in strict, "description": None, **function}


def _shown_format(form: Any, asked: AnswerFormat | None) -> dict[str, Any]:
    """The answer's format in this dialect's own shape, however it was asked for."""
    if asked is None or not asked.is_json:
        return {"type": "text"}
    if asked.kind == "json_object":
        return {"type": "json_object"}
    form = form if isinstance(form, dict) else {}
    inner = form["json_schema"] if isinstance(form.get("json_schema"), dict) else form
    named = {name: inner.get(name) if isinstance(inner.get(name), str) else None for name in ("name", "description")}
    return {"type": "json_schema", **named, "name": named["name"] or "answer", "schema": asked.value, "strict": True}


def _shown_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """A choice in this dialect's shape, which is flat."""
    if isinstance(choice, dict) and choice["type"] == "function":
        return {"type": "function", "name": choice["function"]["name"]}
    if isinstance(choice, dict):
        inner = choice["allowed_tools"]
        names = [{"type": "function", "name": tool["function"]["name"]} for tool in inner["tools"]]
        return {"type": "allowed_tools", "mode": inner["mode"], "tools": names}
    return choice or "auto"


def check_id(value: str, name: str) -> str:
    """``value`` if a response could have this id."""
    if not re.fullmatch(ID_PATTERN, value) or value.endswith("\n"):
        raise InvalidInput(f'{name} must be the id of a response, such as "resp_" and 32 hex digits.', param=name)
    return value


def _conversation(body: dict[str, Any]) -> str | None:
    """``conversation``, an id or an object that has one."""
    value = body.get("conversation")
    if value is None:
        return None
    named = text(value.get("id") if isinstance(value, dict) else value, "conversation")
    if not re.fullmatch(CONVERSATION_PATTERN, named) or named.endswith("\n"):
        message = 'conversation must be the id of a conversation, such as "conv_" and 32 hex digits.'
        raise InvalidInput(message, param="conversation")
    return named


def parse_input(value: Any, takes: frozenset[PartKind] = TEXT_ONLY) -> list[dict[str, Any]]:
    """``input``, a string or a list of items, as messages."""
    if isinstance(value, str):
        return parse_messages([{"role": "user", "content": text(value, "input")}])
    if value is None:
        raise InvalidInput("input is missing; send a string or an array of items.", param="input")
    out: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(objects(value, "input", limit=MAX_MESSAGES)):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            out.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": text(item.get("call_id"), f"{where}.call_id", limit=256),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            # Calls made at once, and what was said before them, are one turn of the assistant.
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = text(item.get("call_id"), f"{where}.call_id", limit=256)
            if item.get("output") is None:
                raise InvalidInput(f"{where}.output is missing; send a string.", param=f"{where}.output")
            out.append({"role": "tool", "tool_call_id": call_id, "content": item["output"]})
        elif kind == "compaction":
            out.append(summary_message(item, where))
        elif kind == "reasoning":
            thought = _reasoning_text(item, where)
            continue
        else:
            named = f'"{kind[:32]}"' if isinstance(kind, str) else "of that kind"
            message = (
                f"{where}: items {named} are not supported; send messages, function_call and function_call_output."
            )
            raise InvalidInput(message, param=f"{where}.type")
        if thought and out[-1]["role"] == "assistant":
            out[-1]["reasoning_content"] = thought
        thought = ""
    return parse_messages(out, takes)


def _reasoning_text(item: dict[str, Any], where: str) -> str:
    """What a reasoning item of an earlier turn says, as far as it says it openly."""
    parts = item.get("content")
    if parts is None:
        return ""
    listed = objects(parts, f"{where}.content", limit=MAX_PARTS)
    return "".join(text(part.get("text"), f"{where}.content.text") for part in listed)


def _max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    asked = TOKENS.read(body, "max_output_tokens")
    return {} if asked is None else {"max_completion_tokens": asked}


def _logprobs(body: dict[str, Any]) -> int | None:
    include = body.get("include")
    top = TOP_LOGPROBS.read(body, "top_logprobs")
    if include is None:
        return None
    if not isinstance(include, list) or not all(isinstance(item, str) for item in include):
        raise refuse("include", "an array of strings", include)
    return (top or 0) if LOGPROBS in include else None


def _text_format(body: dict[str, Any]) -> Any:
    config = body.get("text")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise refuse("text", "an object", config)
    return config.get("format")
