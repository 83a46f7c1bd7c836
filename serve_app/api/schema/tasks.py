"""JSON Schemas of a model's input and output, as `GET /ai/models/schema` shows them, from the ranges the
readers check."""

from __future__ import annotations

from typing import Any

from serve_app.api import multi_vector
from serve_app.api.fields import asked, messages, sampling, thinking
from serve_app.api.types import ModelLimits
from serve_app.api.workers_ai import read as workers_ai

Schema = dict[str, Any]


def _field(kind: str | list[str], description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **more,
    }


def schema(task: str, limits: ModelLimits | None = None) -> dict[str, Schema]:
    """``{"input", "output"}`` for a catalogue task: text-generation, text-embeddings or reranking."""
    limits = limits or ModelLimits()
    if task == "text-generation":
        return {"input": _generate_input(limits), "output": _generate_output()}
    if task == "text-embeddings":
        return {"input": _embed_input(), "output": _embed_output()}
    if task == "reranking":
        return {"input": _rerank_input(), "output": _rerank_output()}
    raise ValueError(f"no schema for task {task!r}")


def _sampling_fields(limits: ModelLimits) -> Schema:
    number, integer = "number", "integer"
    return {
        "max_tokens": _field(
            integer,
            "Most tokens to generate.",
            minimum=1,
            maximum=sampling.MAX_TOKENS,
            default=limits.default_max_tokens,
        ),
        "temperature": _field(
            number,
            "Randomness; 0 always takes the likeliest token.",
            minimum=0,
            maximum=5,
            default=limits.temperature,
        ),
        "top_p": _field(
            number,
            "Keeps the likeliest tokens whose probabilities reach this sum.",
            minimum=0,
            maximum=2,
            default=limits.top_p,
        ),
        "top_k": _field(
            integer,
            "Keeps this many of the likeliest tokens; 0 is off.",
            minimum=0,
            maximum=sampling.MAX_TOP_K,
            default=limits.top_k,
        ),
        "min_p": _field(
            number,
            "Drops tokens less likely than this share of the likeliest.",
            minimum=0,
            maximum=1,
            default=limits.min_p,
        ),
        "seed": _field(integer, "Makes the answer repeatable.", minimum=0, maximum=sampling.MAX_SEED),
        "repetition_penalty": _field(
            number,
            "Above 1 makes tokens seen before less likely.",
            minimum=0,
            maximum=2,
            default=limits.repetition_penalty,
        ),
        "frequency_penalty": _field(
            number, "Lowers tokens by how often the answer has them.", minimum=-2, maximum=2, default=0
        ),
        "presence_penalty": _field(
            number, "Lowers tokens that the answer has already.", minimum=-2, maximum=2, default=0
        ),
        "stop": {
            "description": "Ends the answer before any of these strings.",
            "oneOf": [
                {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": sampling.MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS},
                },
            ],
        },
        "logit_bias": _field(
            "object",
            "Token ids and what to add to their logits.",
            maxProperties=sampling.MAX_BIASES,
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
        "logprobs": _field("boolean", "Returns log-probabilities of the tokens.", default=False),
        "top_logprobs": _field(
            integer, "Alternatives per token; needs logprobs.", minimum=0, maximum=sampling.MAX_TOP_LOGPROBS
        ),
        "n": _field(integer, "How many answers.", minimum=1, maximum=sampling.MAX_N, default=1),
    }


def asked_fields() -> Schema:
    """How a request may ask to be treated, in every dialect and for every task."""
    options = {
        "rejectIfBusy": _field("boolean", "Fails at once where the request would have to wait."),
        "deadlineMs": _field(
            "integer",
            "Milliseconds in which the answer must have begun; refused with 3007 otherwise.",
            minimum=1,
            maximum=asked.MAX_DEADLINE_MS,
        ),
    }
    return {
        "options": _object(options),
        "prompt_cache_key": _field(
            "string",
            "Requests that begin alike share one; like the header x-session-affinity.",
            maxLength=asked.MAX_SESSION_CHARS,
        ),
        "service_tier": _field("string", "Kept; priority comes from the key.", maxLength=64),
        "metadata": _field(
            "object",
            "Up to 16 strings of the client's own.",
            maxProperties=asked.MAX_METADATA,
            additionalProperties={"type": ["string", "number", "boolean", "null"]},
        ),
    }


def thinking_fields() -> Schema:
    switches: Schema = {name: {"type": "boolean"} for name in thinking.SWITCHES}
    effort = {"type": "string", "enum": list(thinking.EFFORTS)}
    return {
        "reasoning_effort": {**effort, "description": "How much a reasoning model thinks; none switches it off."},
        "chat_template_kwargs": _object({**switches, "reasoning_effort": effort}, additionalProperties=False),
    }


def _generate_input(limits: ModelLimits) -> Schema:
    common = {
        **_sampling_fields(limits),
        "stream": _field("boolean", "Answers with server-sent events.", default=False),
        "tools": {
            "type": "array",
            "maxItems": messages.MAX_TOOLS,
            "description": "Functions the model may call, flat or as {type: function, function: {...}}.",
            "items": {
                "oneOf": [
                    _tool(),
                    _object({"type": {"const": "function"}, "function": _tool()}, ["type", "function"]),
                ]
            },
        },
        "tool_choice": {
            "description": "Whether tools may or must be called, and which.",
            "anyOf": [{"type": "string", "enum": ["auto", "none", "required", "any"]}, {"type": "object"}],
        },
        **format_fields(),
        "parallel_tool_calls": _field("boolean", "False ends the answer after its first tool call.", default=True),
        **thinking_fields(),
        **asked_fields(),
    }
    prompt = {
        "prompt": _field("string", "What the model answers to.", minLength=1),
        "raw": _field("boolean", "Sends the prompt without the chat template.", default=False),
    }
    part = _object({"type": {"const": "text"}, "text": {"type": "string"}}, ["type", "text"])
    content = {"oneOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]}
    message = _object(
        {
            "role": _field(
                "string", "Who speaks; developer is the same as system.", enum=[*messages.ROLES, "developer"]
            ),
            "content": content,
            "name": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "tool_call_id": {"type": "string"},
        },
        ["role"],
    )
    chat = {
        "messages": {
            "type": "array",
            "description": "The conversation so far.",
            "minItems": 1,
            "maxItems": messages.MAX_MESSAGES,
            "items": message,
        }
    }
    return {
        "type": "object",
        "oneOf": [
            {"title": "Prompt", **_object({**prompt, **common}, ["prompt"])},
            {"title": "Messages", **_object({**chat, **common}, ["messages"])},
        ],
    }


def tool_name() -> Schema:
    return {"type": "string", "pattern": f"^{messages.TOOL_NAME}$"}


def _tool() -> Schema:
    return _object(
        {"name": tool_name(), "description": {"type": "string"}, "parameters": {"type": "object"}},
        ["name"],
    )


def _usage(*, output: bool = True) -> Schema:
    integer = {"type": "integer", "minimum": 0}
    fields: Schema = {"prompt_tokens": integer, "completion_tokens": integer, "total_tokens": integer}
    if output:
        fields["prompt_tokens_details"] = _object({"cached_tokens": integer})
    return _object({**fields, "neurons": _field("number", "Price in neurons.")}, ["prompt_tokens", "total_tokens"])


def format_fields() -> Schema:
    """What the answer must look like."""
    kinds = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
    text = {"type": "string"}
    choices = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1024}
    return {
        "response_format": _object(
            {"type": kinds, "json_schema": {"type": "object"}},
            ["type"],
            description="JSON, or JSON of a schema, bare or as {name, schema}.",
        ),
        "guided_json": _field("object", "The answer is JSON of this schema."),
        "guided_regex": {**text, "description": "The answer matches this expression."},
        "guided_choice": {**choices, "description": "The answer is one of these."},
        "guided_grammar": {**text, "description": "The answer follows this grammar, in Lark or GBNF."},
        "structured_outputs": _field("object", "The same: one of json, regex, choice, grammar, json_object."),
    }


def _generate_output() -> Schema:
    call = _object({"id": {"type": "string"}, "name": {"type": "string"}, "arguments": {"type": "object"}}, ["name"])
    answer = _object(
        {
            "response": _field(["string", "object", "array"], "The answer; in JSON mode the object or array itself."),
            "tool_calls": {"type": "array", "items": call},
            "finish_reason": {"type": "string", "enum": ["stop", "length", "tool_calls"]},
            "usage": _usage(),
            "choices": _field("array", "The same, and further answers, in OpenAI's shape.", items={"type": "object"}),
        },
        ["response", "usage"],
    )
    stream = {"type": "string", "contentType": "text/event-stream", "format": "binary"}
    return {"oneOf": [answer, stream]}


def _contexts() -> Schema:
    item = _object({"text": {"type": "string"}}, ["text"])
    return {"type": "array", "minItems": 1, "maxItems": workers_ai.MAX_CONTEXTS, "items": item}


def _embed_input() -> Schema:
    text = {
        "description": "The text to embed, or several.",
        "oneOf": [
            {"type": "string", "minLength": 1},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": workers_ai.MAX_TEXTS,
                "items": {"type": "string", "minLength": 1},
            },
        ],
    }
    pooling = _field("string", "How token vectors become one.", enum=["mean", "cls"])
    readings = {
        "return_dense": _field("boolean", "The vector of the text.", default=True),
        "return_sparse": _field("boolean", "lexical_weights, where the model has them.", default=False),
        "return_colbert_vecs": _field("boolean", "A vector per token, where the model has them.", default=False),
    }
    weight = {"type": "number", "minimum": 0, "maximum": 1e6}
    scored = {
        "query": _field("string", "Scores contexts against this."),
        "contexts": _contexts(),
        "pooling": pooling,
        "score_mode": _field("string", "What scores compare.", enum=list(multi_vector.MODES), default="dense"),
        "score_weights": _field("array", "Of dense, sparse and colbert in all.", items=weight, minItems=3, maxItems=3),
        **readings,
    }
    return {
        "type": "object",
        "oneOf": [_object({"text": text, "pooling": pooling, **readings}, ["text"]), _object(scored, ["contexts"])],
    }


def _embed_output() -> Schema:
    vectors = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    fields = {
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": vectors,
        "pooling": {"type": "string", "enum": ["mean", "cls"]},
        "usage": _usage(output=False),
    }
    return _object(fields, ["shape", "data"])


def _rerank_input() -> Schema:
    fields = {
        "query": _field("string", "What the contexts are ranked for.", minLength=1),
        "contexts": _contexts(),
        "top_k": _field("integer", "Returns only this many of the best.", minimum=1),
    }
    return _object(fields, ["query", "contexts"])


def _rerank_output() -> Schema:
    item = _object({"id": _field("integer", "Index into contexts."), "score": {"type": "number"}}, ["id", "score"])
    return _object({"response": {"type": "array", "items": item}, "usage": _usage(output=False)}, ["response"])
