"""Pieces of the JSON Schemas that dialects and tasks show, from the ranges the readers check."""

from __future__ import annotations

from typing import Any

from serve_app.api.fields import asked, messages, ranges, sampling, thinking
from serve_app.api.fields.content import TEXT_ONLY, PartKind
from serve_app.api.fields.pictures import picture_schema
from serve_app.api.fields.sounds import sound_schema
from serve_app.api.types import ModelLimits
from serve_app.api.workers_ai import read as workers_ai

Schema = dict[str, Any]


def field(kind: str | list[str], description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


def object_(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **more,
    }


def ranged(values: ranges.Range, description: str, **more: Any) -> Schema:
    """A field of numbers, with the bounds that its reader checks."""
    return {**values.schema, "description": description, **more}


def sampling_fields(limits: ModelLimits) -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
    return {
        "max_tokens": ranged(ranges.TOKENS, "Most tokens to generate.", default=limits.default_max_tokens),
        "min_tokens": ranged(ranges.LEAST_TOKENS, "Tokens before which the answer does not end.", default=0),
        "temperature": ranged(
            ranges.TEMPERATURE, "Randomness; 0 always takes the likeliest token.", default=limits.temperature
        ),
        "top_p": ranged(
            ranges.TOP_P, "Keeps the likeliest tokens whose probabilities reach this sum.", default=limits.top_p
        ),
        "top_k": ranged(ranges.TOP_K, "Keeps this many of the likeliest tokens; 0 is off.", default=limits.top_k),
        "min_p": ranged(
            ranges.MIN_P, "Drops tokens less likely than this share of the likeliest.", default=limits.min_p
        ),
        "seed": ranged(ranges.SEED, "Makes the answer repeatable."),
        "repetition_penalty": ranged(
            ranges.REPETITION_PENALTY,
            "Above 1 makes tokens seen before less likely.",
            **({} if limits.repetition_penalty is None else {"default": limits.repetition_penalty}),
        ),
        "frequency_penalty": ranged(ranges.PENALTY, "Lowers tokens by how often the answer has them.", default=0),
        "presence_penalty": ranged(ranges.PENALTY, "Lowers tokens that the answer has already.", default=0),
        "stop": {
            "description": "Ends the answer before any of these strings.",
            "oneOf": [stop, {"type": "array", "maxItems": sampling.MAX_STOPS, "items": stop}],
        },
        "logit_bias": field(
            "object",
            "Token ids and what to add to their logits.",
            maxProperties=sampling.MAX_BIASES,
            additionalProperties=ranges.BIAS.schema,
        ),
        "logprobs": field("boolean", "Returns log-probabilities of the tokens.", default=False),
        "top_logprobs": ranged(ranges.TOP_LOGPROBS, "Alternatives per token; needs logprobs."),
        "n": ranged(ranges.CHOICES, "How many answers.", default=1),
    }


def asked_fields() -> Schema:
    """How a request may ask to be treated, in every dialect and for every task."""
    options = {
        "rejectIfBusy": field("boolean", "Fails at once where the request would have to wait."),
        "deadlineMs": ranged(
            ranges.DEADLINE_MS, "Milliseconds in which the answer must have begun; refused with 3007 otherwise."
        ),
        "resumable": ranged(
            ranges.RESUMABLE_S,
            "Seconds a stream goes on without a client, and is kept after its end; like the header x-resumable.",
        ),
        "estimate": field("boolean", "Tells what the request would cost, and does not run it; like x-estimate."),
    }
    return {
        "options": object_(options),
        "prompt_cache_key": field(
            "string",
            "Requests that begin alike share one; like the header x-session-affinity.",
            maxLength=asked.MAX_SESSION_CHARS,
        ),
        "service_tier": field("string", "Kept; priority comes from the key.", maxLength=64),
        "metadata": field(
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
        "chat_template_kwargs": object_({**switches, "reasoning_effort": effort}, additionalProperties=False),
    }


def generation_fields(limits: ModelLimits) -> Schema:
    """What every native body of text generation may say beside its prompt or messages."""
    return {
        **sampling_fields(limits),
        "stream": field("boolean", "Answers with server-sent events.", default=False),
        "tools": {
            "type": "array",
            "maxItems": messages.MAX_TOOLS,
            "description": "Functions the model may call, flat or as {type: function, function: {...}}.",
            "items": {
                "oneOf": [
                    tool_schema(),
                    object_({"type": {"const": "function"}, "function": tool_schema()}, ["type", "function"]),
                ]
            },
        },
        "tool_choice": {
            "description": "Whether tools may or must be called, and which.",
            "anyOf": [{"type": "string", "enum": ["auto", "none", "required", "any"]}, {"type": "object"}],
        },
        **format_fields(),
        "parallel_tool_calls": field("boolean", "False ends the answer after its first tool call.", default=True),
        **thinking_fields(),
        **asked_fields(),
        **(lora_field() if limits.lora else {}),
    }


def lora_field() -> Schema:
    return {"lora": field("string", "The id or name of a fine-tune of the account, or of a public one.", maxLength=200)}


def messages_field(takes: frozenset[PartKind] = TEXT_ONLY) -> Schema:
    """A conversation in OpenAI's shape, with parts of the kinds that the model ``takes``."""
    said = object_({"type": {"const": "text"}, "text": {"type": "string"}}, ["type", "text"])
    files = {"image": picture_schema, "audio": sound_schema}
    shown = [schema() for kind, schema in files.items() if kind in takes]
    part = {"oneOf": [said, *shown]} if shown else said
    content = {"oneOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]}
    message = object_(
        {
            "role": field(
                "string", "Who speaks; developer is the same as system.", enum=[*messages.ROLES, "developer"]
            ),
            "content": content,
            "name": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "tool_call_id": {"type": "string"},
        },
        ["role"],
    )
    return {
        "messages": {
            "type": "array",
            "description": "The conversation so far.",
            "minItems": 1,
            "maxItems": messages.MAX_MESSAGES,
            "items": message,
        }
    }


def tool_name() -> Schema:
    return {"type": "string", "pattern": f"^{messages.TOOL_NAME}$"}


def tool_schema() -> Schema:
    return object_(
        {"name": tool_name(), "description": {"type": "string"}, "parameters": {"type": "object"}},
        ["name"],
    )


def usage_schema(*, output: bool = True) -> Schema:
    integer = {"type": "integer", "minimum": 0}
    fields: Schema = {"prompt_tokens": integer, "completion_tokens": integer, "total_tokens": integer}
    if output:
        fields["prompt_tokens_details"] = object_({"cached_tokens": integer})
    text = {"type": "string"}
    cost = object_({"amount": text, "currency": text}, ["amount", "currency"])
    fields |= {"neurons": field("number", "Price in neurons."), "cost": cost}
    return object_(fields, ["prompt_tokens", "total_tokens"])


def format_fields() -> Schema:
    """What the answer must look like."""
    kinds = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
    text = {"type": "string"}
    choices = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1024}
    return {
        "response_format": object_(
            {"type": kinds, "json_schema": {"type": "object"}},
            ["type"],
            description="JSON, or JSON of a schema, bare or as {name, schema}.",
        ),
        "guided_json": field("object", "The answer is JSON of this schema."),
        "guided_regex": {**text, "description": "The answer matches this expression."},
        "guided_choice": {**choices, "description": "The answer is one of these."},
        "guided_grammar": {**text, "description": "The answer follows this grammar, in Lark or GBNF."},
        "structured_outputs": field("object", "The same: one of json, regex, choice, grammar, json_object."),
    }


def contexts_schema() -> Schema:
    item = object_({"text": {"type": "string"}}, ["text"])
    return {"type": "array", "minItems": 1, "maxItems": workers_ai.MAX_CONTEXTS, "items": item}


def shorten_fields() -> Schema:
    """How long texts may be cut; for embeddings as well."""
    return {
        "truncate": {
            "description": "Whether texts that are too long are cut; Cohere's words name the side.",
            "anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["NONE", "START", "END"]}],
        },
        "truncate_inputs": field("boolean", "Whether texts that are too long are cut."),
        "truncate_prompt_tokens": {
            "description": "Keeps this many tokens of a text; -1 as many as the model takes.",
            "anyOf": [{"const": -1}, ranges.DOCUMENT_TOKENS.schema],
        },
        "truncation_side": field("string", "Where texts are cut.", enum=["left", "right"]),
    }
