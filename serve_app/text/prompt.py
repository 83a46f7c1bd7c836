"""From a generation request to token ids: template, safety of control tokens, and the context window."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from serve_app.api.errors import ContextTooLong, InvalidInput
from serve_app.api.fields.body import parse_inner
from serve_app.api.fields.content import MEDIA, Content, content_text, text_part
from serve_app.api.types import GenerateRequest
from serve_app.text.chat_template import TemplateFailed, map_strings
from serve_app.text.media import MediaFile, Placed, count_tokens, expand, place
from serve_app.text.reasoning import MARKS
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls.kimi import Kimi, number_calls
from serve_app.text.truncate import without_oldest

_THINK = MARKS["qwen3"]


@dataclass(slots=True)
class Prompt:
    """``ids``: int32 [tokens]; ``media``: where files of the conversation stand among them."""

    ids: np.ndarray
    media: tuple[Placed, ...] = ()


def prompt_ids(
    tokenizer: Tokenizer, request: GenerateRequest, *, context_window: int | None = None, at_once: bool = False
) -> np.ndarray:
    """The token ids of :func:`read_prompt`."""
    return read_prompt(tokenizer, request, context_window=context_window, at_once=at_once).ids


def read_prompt(
    tokenizer: Tokenizer, request: GenerateRequest, *, context_window: int | None = None, at_once: bool = False
) -> Prompt:
    """The prompt of ``request``.

    Messages, and a prompt that is not raw, go through the model's chat template; a raw prompt is the client's
    own rendering, in which control tokens count. Files in messages have been looked at (:func:`with_files`).
    Raises `InvalidInput` (no template, template refuses, nothing to say) and `ContextTooLong`, early where a prompt
    cannot fit whatever its tokens are; with ``at_once`` `NoCopy` where it takes a while.
    """
    media: tuple[Placed, ...] = ()
    if request.prompt_ids is not None:
        ids = np.asarray(request.prompt_ids, dtype=np.int32)
    elif request.messages is None and (request.raw or tokenizer.chat_template() is None):
        text = request.prompt or ""
        _refuse_huge(tokenizer.min_tokens(text), request, context_window)
        ids = tokenizer.encode_prompt(
            text if request.raw else tokenizer.control.neutralise(text), add_special_tokens=True, at_once=at_once
        )
    else:
        messages = request.messages or [{"role": "user", "content": request.prompt or ""}]
        if request.keep_tokens is not None and any(map(file_parts, messages)):
            raise InvalidInput(
                "A prompt with pictures or sounds can't be cut; leave old messages out.", param="messages"
            )
        shortened = None
        if request.drop_oldest and context_window is not None:
            most = context_window - _room(request, context_window)
            shortened = without_oldest(messages, lambda some: _within(tokenizer, request, some, most, at_once))
        if shortened is None:
            _refuse_huge(_least(tokenizer, messages), request, context_window)
            shortened = _conversation(tokenizer, request, messages, at_once)
        ids, media = shortened.ids, shortened.media
    if request.keep_tokens is not None:
        kept = _kept(request, context_window)
        ids = ids[:kept] if request.keep_first else ids[-kept:]
    if len(ids) == 0:
        raise InvalidInput("The prompt has no tokens; send some text.", param="prompt")
    return Prompt(ids, media)


def _conversation(
    tokenizer: Tokenizer, request: GenerateRequest, messages: list[dict[str, Any]], at_once: bool
) -> Prompt:
    tools = None if request.tool_choice == "none" else request.tools
    text = render(tokenizer, messages, tools, **request.template_kwargs)
    files = [part["file"] for message in messages for part in file_parts(message)]
    if not files:
        return Prompt(tokenizer.encode_prompt(text, at_once=at_once))
    ids = tokenizer.encode_prompt(expand(text, files, tokenizer.rule_of), at_once=at_once)
    return Prompt(ids, place(ids, files, tokenizer.rule_of))


def file_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message that are pictures or sounds."""
    content = message.get("content")
    return [part for part in content if part["type"] in MEDIA] if isinstance(content, list) else []


def with_files(messages: list[dict[str, Any]], files: Sequence[MediaFile]) -> list[dict[str, Any]]:
    """``messages`` with ``files``, as many and in the same order, in place of the parts that they came in."""
    left = iter(files)

    def looked_at(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": part["type"], "file": next(left)} if part["type"] in MEDIA else part

    return [
        {**message, "content": list(map(looked_at, message["content"]))} if file_parts(message) else message
        for message in messages
    ]


def _within(
    tokenizer: Tokenizer, request: GenerateRequest, messages: list[dict[str, Any]], most: int, at_once: bool
) -> Prompt | None:
    """The conversation's prompt if it has at most ``most`` tokens."""
    if _least(tokenizer, messages) > most:
        return None
    found = _conversation(tokenizer, request, messages, at_once)
    return found if len(found.ids) <= most else None


def _least(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> int:
    """Tokens that a conversation has at the very least, known before anything is written or tokenised."""
    files = [part["file"] for message in messages for part in file_parts(message)]
    text = "".join(_said(m.get("content")) for m in messages)
    return tokenizer.min_tokens(text) + count_tokens(files, tokenizer.rule_of)


def _said(content: Content | None) -> str:
    """The text of a message, files aside."""
    if isinstance(content, list):
        content = [part for part in content if part["type"] not in MEDIA]
    return content_text(content)


def _room(request: GenerateRequest, context_window: int) -> int:
    """Tokens of the window that are the answer's: what was asked for, or as much as the default, up to a quarter."""
    most = request.sampling.max_tokens
    return most if request.max_tokens_given else min(most, context_window // 4)


def fit_context(request: GenerateRequest, prompt_tokens: int, context_window: int) -> GenerateRequest:
    """``request`` with a limit of tokens that fits the context window.

    A limit that the client asked for must fit as it is (`ContextTooLong` otherwise); the default is
    shortened.
    """
    wanted = request.sampling.max_tokens
    room = context_window - prompt_tokens
    if wanted <= room:
        return request
    if request.max_tokens_given or room < 1:
        raise ContextTooLong(prompt_tokens, _asked_tokens(request), context_window)
    least = min(request.sampling.min_tokens, room)
    return replace(request, sampling=replace(request.sampling, max_tokens=room, min_tokens=least))


def _refuse_huge(least: int, request: GenerateRequest, context_window: int | None) -> None:
    """Before ``least`` tokens and more are written."""
    if request.keep_tokens is not None:
        return
    if context_window is not None and least >= context_window:
        raise ContextTooLong(least, _asked_tokens(request), context_window, at_least=True)


def _kept(request: GenerateRequest, context_window: int | None) -> int:
    """How many tokens of the prompt stay, the last ones."""
    assert request.keep_tokens is not None
    if request.keep_tokens > 0 or context_window is None:
        return max(request.keep_tokens, 0)
    return max(context_window - (request.sampling.max_tokens if request.max_tokens_given else 1), 1)


def _asked_tokens(request: GenerateRequest) -> int | None:
    return request.sampling.max_tokens if request.max_tokens_given else None


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    continue_final_message: bool = False,
    **switches: Any,
) -> str:
    """The conversation as a prompt for `Tokenizer.encode_prompt`, with stand-ins for control tokens in
    people's text. With ``continue_final_message`` it ends where the last message's text does."""
    template = tokenizer.chat_template(with_tools=bool(tools))
    if template is None:
        raise InvalidInput("This model has no chat template; send prompt instead of messages.", param="messages")
    ready = [_for_template(tokenizer, message, template.source) for message in messages]
    if Kimi.marker in template.source:
        number_calls(ready)
    end = ""
    if continue_final_message:
        # As transformers does it: whatever the template writes behind this mark belongs to the turn's end.
        end = secrets.token_hex(16)
        ready[-1]["content"] = _lengthened(ready[-1]["content"], end)
    edgy = False

    def safe(text: str) -> str:
        nonlocal edgy
        edgy = edgy or tokenizer.control.edges(text)
        return tokenizer.control.neutralise(text)

    def fill(change: Any) -> str:
        # Roles are from our own list; templates compare them, so they stay as they are.
        changed = [{**map_strings(m, change), "role": m["role"]} for m in ready]
        kinds = [{**map_strings(tool, change), "type": "function"} for tool in tools or ()]
        rendered = template.render(changed, kinds or None, **switches)
        if end and end not in rendered:
            raise TemplateFailed("it does not show the last message, which is to be continued")
        return rendered[: rendered.rindex(end)] if end else rendered

    try:
        text = fill(safe)
        if not edgy:
            return text
        # Some text begins or ends like a control token ("> quoted"). Where gaps at those edges change the
        # number of control tokens, the text had completed one together with its surroundings, and the gaps
        # stay.
        marked = fill(lambda s: tokenizer.control.mark(tokenizer.control.neutralise(s)))
    except TemplateFailed as error:
        raise InvalidInput(f"The model's chat template refuses this conversation: {error}", param="messages") from None
    return text if tokenizer.control.count(text) == tokenizer.control.count(marked) else marked


def _lengthened(content: Content, end: str) -> Content:
    """A message's content with ``end`` behind its last text."""
    if isinstance(content, str):
        return content + end
    last = content[-1] if content else text_part("")
    return [*content[:-1], text_part(last["text"] + end)] if last["type"] == "text" else [*content, text_part(end)]


def _for_template(tokenizer: Tokenizer, message: dict[str, Any], source: str) -> dict[str, Any]:
    """A message as the template ``source`` expects it: text where there is none, arguments of tool calls as objects;
    parts where there are files, or where it shows nothing else."""
    out = {**message, "content": _said(message.get("content"))}
    splits = _THINK.end in tokenizer.control.names and out["role"] == "assistant"
    if splits and "reasoning_content" not in out:
        out.update(_thought(out["content"], source))
    if ".thinking" in source and out.get("reasoning_content") and not out["content"]:
        out["thinking"] = out["reasoning_content"]  # as gpt-oss's template calls it, which takes it beside calls alone
    if message.get("tool_calls"):
        out["tool_calls"] = [_call_for_template(call) for call in message["tool_calls"]]
    else:
        out.pop("tool_calls", None)
    if file_parts(message):
        # Templates tell a part's kind by its type, or by a field of that name.
        out["content"] = [{"type": p["type"], p["type"]: ""} if p["type"] in MEDIA else p for p in message["content"]]
    elif tokenizer.wants_parts:
        out["content"] = [text_part(out["content"])] if out["content"] else []
    return out


def _thought(content: str, source: str) -> dict[str, str]:
    """What a template that splits an assistant's text at the end of its reasoning makes of ``content``. It could not do
    so itself: there the mark is people's text, which is no control token."""
    end = _THINK.end
    if end not in content or not any(f"split({quote}{end}{quote})" in source for quote in "'\""):
        return {}
    before, rest = content.split(end)[0], content.split(end)[-1]
    if "reasoning_content" not in source:
        return {"content": rest}
    thought = before.rstrip("\n").split(_THINK.start)[-1].lstrip("\n")
    return {"content": rest.lstrip("\n"), "reasoning_content": thought}


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        # What is no JSON within the bounds of a body is shown to the model as the text it is.
        with contextlib.suppress(ValueError):
            function["arguments"] = parse_inner(function["arguments"], json.loads)
    return {**call, "function": function}
