"""The native body of text generation: ``prompt`` or ``messages``."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.content import MEDIA, text_part
from serve_app.api.fields.formats import parse_format
from serve_app.api.fields.lora import parse_lora
from serve_app.api.fields.messages import parse_messages, parse_tool_choice, parse_tools, strict_tools
from serve_app.api.fields.pictures import picture_of
from serve_app.api.fields.sampling import (
    parse_chat_logprobs,
    parse_n,
    parse_sampling,
    parse_stop,
    refuse_unsupported,
)
from serve_app.api.fields.shorten import parse_prompt_kept
from serve_app.api.fields.sounds import sound_of
from serve_app.api.fields.thinking import parse_thinking
from serve_app.api.fields.values import boolean, string
from serve_app.api.types import GenerateRequest, ModelLimits
from serve_app.api.workers_ai.read import open_native

# Files beside a prompt.
_FILES = {"image": picture_of, "audio": sound_of}
_NOTHING: tuple[Any, ...] = (None, "", [])
_PROMPT_OR_MESSAGES = "required: either prompt (a string) or messages (an array of {role, content})"


def parse_generate(
    body: bytes | dict[str, Any],
    model: str,
    limits: ModelLimits | None = None,
) -> GenerateRequest:
    """Text generation from ``prompt`` or ``messages``, with a picture or sound beside them for models that take
    these."""
    body, asked = open_native(body)
    limits = limits or ModelLimits()
    lora = parse_lora(body, model, limits)
    beside = MEDIA & limits.takes
    refuse_unsupported(body, but=beside)
    files = [_FILES[name](body[name], name) for name in _FILES if name in beside and body.get(name) not in _NOTHING]
    if files:
        body = _with_files(body, files)
    prompt = string(body, "prompt")
    messages = body.get("messages")
    # cloudflare-python insists on a prompt even where messages come as an extra, and then sends "".
    if messages is not None and prompt:
        raise InvalidInput("prompt and messages exclude each other; send one of them.", param="prompt")
    if messages is None and not prompt:
        raise InvalidInput(f"Input does not match the model's schema: {_PROMPT_OR_MESSAGES}.", param="prompt")
    sampling, given = parse_sampling(body, limits, logprobs=parse_chat_logprobs(body))
    tools = parse_tools(body.get("tools"))
    tool_choice = parse_tool_choice(body.get("tool_choice"), tools)
    return GenerateRequest(
        model=model,
        messages=None if messages is None else parse_messages(messages, limits.takes),
        prompt=prompt if messages is None else None,
        raw=_raw(body) and messages is None,
        sampling=sampling,
        stop=parse_stop(body.get("stop")),
        n=parse_n(body),
        stream=bool(boolean(body, "stream")),
        include_usage=True,
        **parse_prompt_kept(body),
        tools=tools,
        tool_choice=tool_choice,
        **asked,
        max_tokens_given=given,
        template_kwargs=parse_thinking(body, body.get("reasoning_effort")),
        parallel_tool_calls=boolean(body, "parallel_tool_calls") is not False,
        strict_tools=strict_tools(body.get("tools")),
        answer_format=parse_format(body),
        lora=lora,
    )


def _with_files(body: dict[str, Any], files: list[dict[str, Any]]) -> dict[str, Any]:
    """``body`` with ``files``, of the fields that are named like their kinds, before what the user said last."""
    shown = [{"type": part["type"], part["type"]: part["source"]["data"]} for part in files]
    name = files[0]["type"]
    prompt, messages = body.get("prompt"), body.get("messages")
    if messages is None and isinstance(prompt, str) and prompt:
        if _raw(body):
            raise InvalidInput(f"raw and {name} exclude each other: the chat template shows the file.", param="raw")
        return {**body, "prompt": None, "messages": [{"role": "user", "content": [*shown, text_part(prompt)]}]}
    if not isinstance(messages, list):
        return body
    at = next((i for i in reversed(range(len(messages))) if _from_user(messages[i])), None)
    if at is None:
        raise InvalidInput(f"{name} belongs to a message of the user, of which there is none.", param=name)
    said = messages[at].get("content")
    parts = said if isinstance(said, list) else [text_part(said)] if isinstance(said, str) else []
    return {**body, "messages": [*messages[:at], {**messages[at], "content": [*shown, *parts]}, *messages[at + 1 :]]}


def _from_user(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user"


def _raw(body: dict[str, Any]) -> bool:
    # Cloudflare's own pages show the strings "true" and "false" here, and only here.
    if isinstance(body.get("raw"), str) and body["raw"].lower() in ("true", "false"):
        return body["raw"].lower() == "true"
    return bool(boolean(body, "raw"))
