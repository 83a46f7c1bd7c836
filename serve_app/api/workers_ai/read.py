"""Reading the native Workers AI dialect: the body of `/ai/run/{model}` for text generation, embeddings and
reranking."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput, LoraUnsupported
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.body import as_object
from serve_app.api.fields.formats import parse_format
from serve_app.api.fields.messages import parse_messages, parse_tool_choice, parse_tools, strict_tools
from serve_app.api.fields.sampling import (
    parse_chat_logprobs,
    parse_n,
    parse_sampling,
    parse_stop,
    refuse_unsupported,
)
from serve_app.api.fields.thinking import parse_thinking
from serve_app.api.fields.values import boolean, choice, integer, number, objects, refuse, string, text, texts
from serve_app.api.multi_vector import MODES, WEIGHTS
from serve_app.api.types import EmbedRequest, GenerateRequest, ModelLimits, RerankRequest

# Cloudflare's schema stops at 100 texts; its own AI SDK provider sends up to 3000.
MAX_TEXTS = 4096
MAX_CONTEXTS = 4096
_PROMPT_OR_MESSAGES = "required: either prompt (a string) or messages (an array of {role, content})"


def parse_run_target(body: bytes | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The generic form `POST /ai/run` with ``{model, input, options}``: the model's name and the input to
    parse for its task."""
    outer = as_object(body)
    model = string(outer, "model", limit=512)
    if not model:
        raise InvalidInput('model is missing; send {"model": "@cf/...", "input": {...}}.', param="model")
    inputs = outer.get("input")
    if not isinstance(inputs, dict):
        raise refuse("input", "an object with the model's inputs", inputs)
    inner = dict(inputs)
    if outer.get("options") is not None:
        inner.setdefault("options", outer["options"])
    return model, inner


def parse_generate(
    body: bytes | dict[str, Any],
    model: str,
    limits: ModelLimits | None = None,
    *,
    queue_request: bool = False,
) -> GenerateRequest:
    """Text generation from ``prompt`` or ``messages``. ``queue_request``: the query asked for an asynchronous
    batch."""
    body, asked = _open(body, queue_request)
    limits = limits or ModelLimits()
    if body.get("lora") not in (None, ""):
        raise LoraUnsupported(model)
    refuse_unsupported(body)
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
        messages=None if messages is None else parse_messages(messages),
        prompt=prompt if messages is None else None,
        raw=_raw(body) and messages is None,
        sampling=sampling,
        stop=parse_stop(body.get("stop")),
        n=parse_n(body),
        stream=bool(boolean(body, "stream")),
        include_usage=True,
        tools=tools,
        tool_choice=tool_choice,
        **asked,
        max_tokens_given=given,
        template_kwargs=parse_thinking(body, body.get("reasoning_effort")),
        parallel_tool_calls=boolean(body, "parallel_tool_calls") is not False,
        strict_tools=strict_tools(body.get("tools")),
        answer_format=parse_format(body),
    )


def _raw(body: dict[str, Any]) -> bool:
    # Cloudflare's own pages show the strings "true" and "false" here, and only here.
    if isinstance(body.get("raw"), str) and body["raw"].lower() in ("true", "false"):
        return body["raw"].lower() == "true"
    return bool(boolean(body, "raw"))


def parse_embed(body: bytes | dict[str, Any], model: str, *, queue_request: bool = False) -> EmbedRequest:
    """``{text}``, or the forms of bge-m3: ``{contexts}`` (vectors) and ``{query, contexts}`` (scores)."""
    body, asked = _open(body, queue_request)
    pooling = choice(body, "pooling", ("mean", "cls"))
    boolean(body, "truncate_inputs")
    asked |= _readings(body)
    if body.get("contexts") is not None:
        found = _contexts(body["contexts"])
        query = string(body, "query")
        if query:
            mode = choice(body, "score_mode", MODES) or "dense"
            asked |= {"score_mode": mode, "score_weights": _weights(body.get("score_weights")), "return_dense": True}
            asked["heads"] = {"all": ("sparse", "colbert"), "dense": ()}.get(mode, (mode,))
            return EmbedRequest(model, [query, *found], pooling, form="scores", **asked)  # type: ignore[arg-type]
        return EmbedRequest(model, found, pooling, form="contexts", **asked)  # type: ignore[arg-type]
    value = body.get("text")
    if value is None:
        raise InvalidInput(
            "Input does not match the model's schema: required: text (a string or an array of strings).",
            param="text",
        )
    found = texts(value, "text", limit=MAX_TEXTS)
    if not all(found):
        raise InvalidInput("text must not be empty.", param="text")
    return EmbedRequest(model, found, pooling, **asked)  # type: ignore[arg-type]


def _readings(body: dict[str, Any]) -> dict[str, Any]:
    """What to return of each text, in FlagEmbedding's words; the dense vector unless told otherwise."""
    flags = (("sparse", "return_sparse"), ("colbert", "return_colbert_vecs"))
    heads = tuple(head for head, name in flags if boolean(body, name))
    dense = boolean(body, "return_dense") is not False
    if not dense and not heads:
        raise InvalidInput(
            "return_dense is false and nothing else is asked for; set one to true.", param="return_dense"
        )
    return {"heads": heads, "return_dense": dense}


def _weights(value: Any) -> tuple[float, ...]:
    if value is None:
        return WEIGHTS
    named = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) and len(value) == 3 else {}
    found = [number(named, key, 0, 1e6) for key in named]
    if len(found) != 3 or any(item is None for item in found) or not sum(item or 0.0 for item in found):
        message = "score_weights must be three numbers, not all 0: of the dense, sparse and colbert scores."
        raise InvalidInput(message, param="score_weights")
    return tuple(item or 0.0 for item in found)


def parse_rerank(body: bytes | dict[str, Any], model: str, *, queue_request: bool = False) -> RerankRequest:
    """``{query, contexts: [{text}], top_k}``."""
    body, asked = _open(body, queue_request)
    query = string(body, "query")
    if not query:
        raise InvalidInput(
            "Input does not match the model's schema: required: query (a non-empty string).", param="query"
        )
    if body.get("contexts") is None:
        raise InvalidInput(
            "Input does not match the model's schema: required: contexts (an array of {text}).",
            param="contexts",
        )
    contexts = _contexts(body["contexts"])
    return RerankRequest(model, query, contexts, integer(body, "top_k", 1, 2**31 - 1), **asked)


def _contexts(value: Any) -> list[str]:
    found = objects(value, "contexts", limit=MAX_CONTEXTS)
    if not found:
        raise InvalidInput("contexts must hold at least one item.", param="contexts")
    return [text(item.get("text"), f"contexts[{i}].text") for i, item in enumerate(found)]


def _open(body: bytes | dict[str, Any], queue_request: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs, and how the request asks to be treated."""
    body = as_object(body)
    asked = parse_asked(body)
    if queue_request or body.get("requests") is not None or body.get("request_id") is not None:
        raise InvalidInput(
            "Asynchronous batches are not available yet; send one request per input, without queueRequest."
        )
    return body, asked
