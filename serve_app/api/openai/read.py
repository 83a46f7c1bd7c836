"""Reading the OpenAI dialect: chat completions, completions and embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.body import as_object
from serve_app.api.fields.formats import parse_format
from serve_app.api.fields.lora import parse_lora
from serve_app.api.fields.messages import parse_messages, parse_tool_choice, parse_tools, strict_tools
from serve_app.api.fields.ranges import DIMENSIONS, TOP_LOGPROBS
from serve_app.api.fields.sampling import (
    parse_chat_logprobs,
    parse_n,
    parse_sampling,
    parse_stop,
    parse_token_ids,
    refuse_unsupported,
)
from serve_app.api.fields.shorten import parse_prompt_kept, parse_shorten
from serve_app.api.fields.thinking import parse_thinking
from serve_app.api.fields.values import boolean, choice, refuse, string, text, texts
from serve_app.api.types import EmbedRequest, GenerateRequest, ModelLimits

MAX_PROMPTS = 128
# Of one request to /v1/completions, over all its prompts.
MAX_ANSWERS = 128
MAX_INPUTS = 4096
# Fields that other dialects refuse.
_TAKEN = frozenset({"prompt_logprobs"})


def model_of(body: bytes | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model a body names, and the body as an object; the model decides which limits the rest is read
    with."""
    found = as_object(body)
    model = string(found, "model", limit=512)
    if not model:
        raise InvalidInput("model is missing; name one of GET /v1/models.", param="model")
    return model, found


def parse_chat(body: bytes | dict[str, Any], limits: ModelLimits | None = None) -> GenerateRequest:
    """`POST /v1/chat/completions`. Without ``max_tokens`` the record's default for chats applies."""
    model, body = model_of(body)
    refuse_unsupported(body, but=_TAKEN)
    if body.get("messages") is None:
        raise InvalidInput("messages is missing; send an array of {role, content}.", param="messages")
    limits = (limits or ModelLimits()).of_chat
    sampling, given = parse_sampling(body, limits, logprobs=parse_chat_logprobs(body))
    stream = bool(boolean(body, "stream"))
    tools = parse_tools(body.get("tools"))
    told = _of_prompt(body, stream)
    return GenerateRequest(
        model=model,
        lora=parse_lora(body, model, limits),
        messages=parse_messages(body["messages"], limits.takes),
        prompt=None,
        raw=False,
        sampling=replace(sampling, prompt_logprobs=told),
        prompt_logprobs=told,
        stop=parse_stop(body.get("stop")),
        n=parse_n(body),
        stream=stream,
        return_token_ids=bool(boolean(body, "return_token_ids")),
        include_usage=_usage(body, stream, "include_usage"),
        continuous_usage=_usage(body, stream, "continuous_usage_stats") and _usage(body, stream, "include_usage"),
        **parse_prompt_kept(body),
        tools=tools,
        tool_choice=parse_tool_choice(body.get("tool_choice"), tools),
        **parse_asked(body),
        max_tokens_given=given,
        template_kwargs=parse_thinking(body, body.get("reasoning_effort")),
        parallel_tool_calls=boolean(body, "parallel_tool_calls") is not False,
        strict_tools=strict_tools(body.get("tools")),
        answer_format=parse_format(body),
    )


def parse_completions(body: bytes | dict[str, Any], limits: ModelLimits | None = None) -> list[GenerateRequest]:
    """`POST /v1/completions`: one request per prompt (a string, token ids, or an array of either), without
    chat template.

    Choice ``i`` of prompt ``p`` is choice ``p * n + i`` of the answer, which is what `collect.merge` makes of
    their events.
    """
    model, body = model_of(body)
    limits = limits or ModelLimits()
    refuse_unsupported(body, but=_TAKEN)
    logprobs = body.get("logprobs")
    # Chat-minded clients send a boolean here; OpenAI's legacy form is the number of alternatives.
    logprobs = parse_chat_logprobs(body) if isinstance(logprobs, bool) else TOP_LOGPROBS.read(body, "logprobs")
    echo = bool(boolean(body, "echo"))
    stream = bool(boolean(body, "stream"))
    asked = told = _of_prompt(body, stream)
    if echo and logprobs is not None:
        told = max(asked or 0, logprobs)
    # OpenAI's way to ask for nothing but the prompt; a token is drawn for it and not shown.
    nothing = body.get("max_tokens") == 0 and body["max_tokens"] is not False
    prompt_only = nothing and (echo or told is not None)
    if prompt_only:
        body = {**body, "max_tokens": 1}
    sampling, given = parse_sampling(body, limits, logprobs=logprobs)
    base = GenerateRequest(
        model=model,
        lora=parse_lora(body, model, limits),
        messages=None,
        prompt=None,
        raw=True,
        sampling=replace(sampling, prompt_logprobs=told),
        stop=parse_stop(body.get("stop")),
        n=parse_n(body),
        stream=stream,
        include_usage=_usage(body, stream, "include_usage"),
        continuous_usage=_usage(body, stream, "continuous_usage_stats") and _usage(body, stream, "include_usage"),
        **parse_prompt_kept(body),
        echo=echo,
        prompt_only=prompt_only,
        prompt_logprobs=asked,
        return_token_ids=bool(boolean(body, "return_token_ids")),
        answer_format=parse_format(body),
        **parse_asked(body),
        max_tokens_given=given,
    )
    prompts = _prompts(body.get("prompt"), limits)
    if len(prompts) * base.n > MAX_ANSWERS:
        message = f"prompt and n ask for {len(prompts) * base.n} answers; one request gives at most {MAX_ANSWERS}."
        raise InvalidInput(message, param="n")
    return [replace(base, prompt=prompt, prompt_ids=ids, number=i) for i, (prompt, ids) in enumerate(prompts)]


def _of_prompt(body: dict[str, Any], stream: bool) -> int | None:
    """vLLM's ``prompt_logprobs``: how many alternatives to each token of the prompt; None where nothing is asked."""
    told = TOP_LOGPROBS.read(body, "prompt_logprobs")
    if told is not None and stream:
        raise InvalidInput("prompt_logprobs come with whole answers only; leave out stream.", param="prompt_logprobs")
    return told


def _prompts(value: Any, limits: ModelLimits) -> list[tuple[str | None, tuple[int, ...] | None]]:
    if value is None or value == "" or value == []:
        raise InvalidInput("prompt is missing; send a string, an array of strings, or token ids.", param="prompt")
    if isinstance(value, str):
        return [(text(value, "prompt"), None)]
    if not isinstance(value, list):
        raise refuse("prompt", "a string, an array of strings, or token ids", value)
    if isinstance(value[0], str):
        prompts = texts(value, "prompt", limit=MAX_PROMPTS)
        if not all(prompts):
            raise InvalidInput("prompt must not hold an empty string.", param="prompt")
        return [(prompt, None) for prompt in prompts]
    rows = value if isinstance(value[0], list) else [value]
    if len(rows) > MAX_PROMPTS:
        raise InvalidInput(f"prompt must have at most {MAX_PROMPTS} items, got {len(rows)}.", param="prompt")
    found = [parse_token_ids(row, "prompt", limits.vocab_size) for row in rows]
    if not all(found):
        raise InvalidInput("prompt must not hold an empty array of token ids.", param="prompt")
    return [(None, ids) for ids in found]


def parse_embeddings(body: bytes | dict[str, Any]) -> EmbedRequest:
    """`POST /v1/embeddings` with ``input`` as a string, token ids, or an array of either."""
    model, body = model_of(body)
    parse_lora(body, model)
    found, ids = _inputs(body.get("input"))
    return EmbedRequest(
        model=model,
        texts=found,
        ids=ids,
        pooling=choice(body, "pooling", ("mean", "cls")),  # type: ignore[arg-type]
        encoding=choice(body, "encoding_format", ("float", "base64")) or "float",  # type: ignore[arg-type]
        dimensions=DIMENSIONS.read(body, "dimensions"),
        shorten=parse_shorten(body),
        **parse_asked(body),
    )


def _inputs(value: Any) -> tuple[list[str], list[tuple[int, ...]] | None]:
    """Texts, or rows of token ids."""
    if value is None:
        raise InvalidInput("input is missing; send a string or an array of strings.", param="input")
    if isinstance(value, list) and value and isinstance(value[0], (int, float, list)):
        rows = value if isinstance(value[0], list) else [value]
        if len(rows) > MAX_INPUTS:
            raise InvalidInput(f"input must have at most {MAX_INPUTS} items, got {len(rows)}.", param="input")
        ids = [parse_token_ids(row, "input", None) for row in rows]
        if not all(ids):
            raise InvalidInput("input must not hold an empty array of token ids.", param="input")
        return [], ids
    found = texts(value, "input", limit=MAX_INPUTS)
    if not all(found):
        raise InvalidInput("input must not hold an empty string.", param="input")
    return found, None


def _usage(body: dict[str, Any], stream: bool, name: str) -> bool:
    """What ``stream_options`` says of the usage."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise refuse("stream_options", "an object", options)
    asked = bool(boolean(options, name))
    if not stream:
        raise InvalidInput("stream_options needs stream set to true; leave it out.", param="stream_options")
    return asked
