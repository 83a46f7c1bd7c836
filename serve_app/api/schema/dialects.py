"""JSON Schemas of the OpenAI and Anthropic dialects' bodies, from the ranges the readers check. For `/openapi.json`."""

from __future__ import annotations

from serve_app.api.fields import asked, content, messages, ranges, sampling
from serve_app.api.fields.content import HEARS, SEES
from serve_app.api.openai import read as openai
from serve_app.api.responses import read as responses
from serve_app.api.responses import template
from serve_app.api.schema import parts as schemas
from serve_app.api.types import ModelLimits

Schema = schemas.Schema
_MODEL: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 512,
    "description": "The id of a model of GET /v1/models.",
}
_TEXT: Schema = {"type": "string"}
_STREAM: Schema = {"type": "boolean", "description": "Answers with server-sent events.", "default": False}
_FREE: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _sampling(*left_out: str, limits: ModelLimits = ModelLimits()) -> Schema:  # noqa: B008 - frozen
    fields = schemas.sampling_fields(limits)
    fields["max_completion_tokens"] = fields["max_tokens"]
    return {name: field for name, field in fields.items() if name not in left_out}


def chat_input() -> Schema:
    chat = {**schemas.generation_fields(ModelLimits()), **schemas.messages_field(SEES | HEARS)}
    same = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")
    fields = {"model": _MODEL, **{name: chat[name] for name in same}, **schemas.format_fields()}
    return _object(
        {
            **fields,
            **_sampling(limits=ModelLimits().of_chat),
            **_told(),
            **schemas.asked_fields(),
            **schemas.lora_field(),
            "stream": _STREAM,
            "stream_options": _stream_options(),
        },
        "model",
        "messages",
    )


def _told() -> Schema:
    return {
        "prompt_logprobs": schemas.ranged(ranges.TOP_LOGPROBS, "Log-probabilities of the prompt; not with stream."),
        "return_token_ids": {"type": "boolean", "description": "Tells token ids of prompt and answer."},
    }


def _stream_options() -> Schema:
    return _object(
        {
            "include_usage": schemas.field("boolean", "Ends the stream with a chunk of usage."),
            "continuous_usage_stats": schemas.field("boolean", "Tells the usage so far in each chunk."),
        }
    )


def completion_input() -> Schema:
    ids = _list({"type": "integer", "minimum": 0}, minItems=1)
    texts = _list({"type": "string", "minLength": 1}, minItems=1, maxItems=openai.MAX_PROMPTS)
    prompt = {
        "oneOf": [{"type": "string", "minLength": 1}, texts, ids, _list(ids, minItems=1, maxItems=openai.MAX_PROMPTS)]
    }
    logprobs = ranges.TOP_LOGPROBS.schema
    more = {"logprobs": logprobs, "echo": {"type": "boolean"}, **_told()}
    fields = {**_sampling("top_logprobs"), **schemas.asked_fields(), **schemas.lora_field(), **more}
    return _object(
        {"model": _MODEL, "prompt": prompt, **fields, "stream": _STREAM, "stream_options": _stream_options()},
        "model",
        "prompt",
    )


def embeddings_input() -> Schema:
    many = _list({"type": "string", "minLength": 1}, minItems=1, maxItems=openai.MAX_INPUTS)
    ids = _list(_COUNT, minItems=1)
    rows = _list(ids, minItems=1, maxItems=openai.MAX_INPUTS)
    fields = {
        "model": _MODEL,
        "input": {"oneOf": [{"type": "string", "minLength": 1}, many, ids, rows]},
        **schemas.shorten_fields(),
        "encoding_format": {"type": "string", "enum": ["float", "base64"]},
        "dimensions": ranges.DIMENSIONS.schema,
        "pooling": {"type": "string", "enum": ["mean", "cls"]},
    }
    return _object(fields, "model", "input")


def responses_input() -> Schema:
    item = {"type": "object", "description": "A message, function_call, function_call_output or reasoning item."}
    tool = _object(
        {"type": {"const": "function"}, "name": schemas.tool_name(), "description": _TEXT, "parameters": _FREE},
        "type",
        "name",
    )
    fields = {
        "model": _MODEL,
        "input": {"oneOf": [_TEXT, _list(item, minItems=1, maxItems=messages.MAX_MESSAGES)]},
        "instructions": _TEXT,
        "previous_response_id": {
            "type": "string",
            "pattern": responses.ID_PATTERN,
            "description": "Goes on from a stored response.",
        },
        "conversation": {
            "anyOf": [_conversation_id(), _object({"id": _conversation_id()}, "id")],
            "description": "Goes on from a conversation, and adds to it.",
        },
        "prompt": _object(
            {
                "id": {"type": "string", "pattern": template.ID_PATTERN},
                "version": {"type": "string", "maxLength": 64},
                "variables": {"type": "object", "maxProperties": template.MAX_VARIABLES},
            },
            "id",
        ),
        "truncation": {"type": "string", "enum": ["auto", "disabled"], "default": "disabled"},
        "store": {"type": "boolean", "default": True, "description": "Whether others may build on the answer."},
        "max_output_tokens": ranges.TOKENS.schema,
        "tools": _list(tool, maxItems=messages.MAX_TOOLS),
        "tool_choice": {"anyOf": [{"type": "string", "enum": ["auto", "none", "required", "any"]}, _FREE]},
        "text": _object({"format": schemas.format_fields()["response_format"]}),
        "parallel_tool_calls": {"type": "boolean", "default": True},
        "reasoning": _object({"effort": schemas.thinking_fields()["reasoning_effort"]}),
        **schemas.asked_fields(),
        **schemas.lora_field(),
        "temperature": ranges.TEMPERATURE.schema,
        "top_p": ranges.TOP_P.schema,
        "presence_penalty": ranges.PENALTY.schema,
        "frequency_penalty": ranges.PENALTY.schema,
        "include": _list(_TEXT),
        "top_logprobs": ranges.TOP_LOGPROBS.schema,
        "max_tool_calls": schemas.ranged(
            ranges.BEST, "Shown in the answer; calls of server-side tools, which are none."
        ),
        "safety_identifier": schemas.field("string", "Shown in the answer.", maxLength=asked.MAX_SESSION_CHARS),
        "stream": _STREAM,
    }
    return _object(fields, "model", "input")


def _conversation_id() -> Schema:
    return {"type": "string", "pattern": responses.CONVERSATION_PATTERN}


def compact_input() -> Schema:
    fields = responses_input()["properties"]
    names = ("model", "input", "previous_response_id", "instructions", "prompt_cache_key")
    return _object({name: fields[name] for name in names}, "model")


def compaction_output() -> Schema:
    fields = {"id": _TEXT, "object": {"const": "response.compaction"}, "output": _list(_FREE), "usage": _FREE}
    return _object(fields, *fields)


def _block(kind: str, **fields: Schema) -> Schema:
    return _object({"type": {"const": kind}, **fields, "cache_control": _FREE}, "type", *fields)


def _conversation() -> Schema:
    def blocks(*kinds: Schema) -> Schema:
        return {"oneOf": [_TEXT, _list({"anyOf": list(kinds)}, maxItems=content.MAX_PARTS)]}

    def turn(role: str, *kinds: Schema) -> Schema:
        return _object({"role": {"const": role}, "content": blocks(*kinds)}, "role", "content")

    said = _block("text", text=_TEXT)
    name = {"type": "string", "maxLength": 128}
    called = _block("tool_use", id={"type": "string", "maxLength": 256}, name=name, input=_FREE)
    result = _block("tool_result", tool_use_id={"type": "string", "maxLength": 256})
    result["properties"]["content"] = blocks(said)
    thoughts = (_block("thinking", thinking=_TEXT), _block("redacted_thinking"))
    turns = {"anyOf": [turn("user", said, result), turn("assistant", said, called, *thoughts)]}
    tool = _object({"name": schemas.tool_name(), "description": _TEXT, "input_schema": _FREE}, "name", "input_schema")
    return {
        "model": _MODEL,
        "messages": _list(turns, minItems=1, maxItems=messages.MAX_MESSAGES),
        "system": blocks(said),
        "tools": _list(tool, maxItems=messages.MAX_TOOLS),
        "tool_choice": _object({"type": {"type": "string", "enum": ["auto", "none", "any", "tool"]}}, "type"),
        "output_format": _object(
            {"type": {"type": "string", "enum": ["text", "json_schema"]}, "schema": _FREE}, "type"
        ),
    }


def messages_input() -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
    fields = {
        **_conversation(),
        "max_tokens": schemas.ranged(ranges.TOKENS, "Shortened to fit the context window."),
        "stop_sequences": _list(stop, maxItems=sampling.MAX_STOPS),
        "temperature": ranges.TEMPERATURE.schema,
        "top_p": ranges.TOP_P.schema,
        "top_k": ranges.TOP_K.schema,
        "thinking": _object({"type": {"type": "string", "enum": ["enabled", "disabled", "adaptive"]}}, "type"),
        **schemas.lora_field(),
        "stream": _STREAM,
    }
    return _object(fields, "model", "messages", "max_tokens")


def count_input() -> Schema:
    return _object(_conversation(), "model", "messages")


def count_output() -> Schema:
    return _object({"input_tokens": _COUNT}, "input_tokens")


def input_tokens_output() -> Schema:
    return _object({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}, "object", "input_tokens")


def generic_input() -> Schema:
    return _object({"model": _MODEL, "input": _FREE, "options": _FREE}, "model", "input")


def enveloped(result: Schema) -> Schema:
    fields = {"result": result, "success": {"const": True}, "errors": _list(_FREE), "messages": _list(_FREE)}
    return _object(fields, "result", "success", "errors", "messages")


def listing(item: Schema) -> Schema:
    return {**enveloped(_list(item)), "description": "One page; result_info has page, per_page, count and total_count."}


def openai_usage() -> Schema:
    return schemas.usage_schema()


def openai_answer(kind: str) -> Schema:
    """A chat completion (``chat.completion``) or completion (``text_completion``)."""
    choice = _object({"index": _COUNT, "finish_reason": {"type": "string"}}, "index", "finish_reason")
    fields = {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "choices": _list(choice),
        "usage": openai_usage(),
    }
    return _object(fields, "id", "object", "created", "model", "choices", "usage")


def openai_list(item: Schema | None = None) -> Schema:
    return _object({"object": {"const": "list"}, "data": _list(item or _FREE)}, "object", "data")


def openai_model() -> Schema:
    return _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT}, "id", "object")


def response_output() -> Schema:
    fields = {"id": _TEXT, "object": {"const": "response"}, "status": _TEXT, "output": _list(_FREE), "usage": _FREE}
    return _object(fields, "id", "object", "status", "output", "usage")


def message_output() -> Schema:
    usage = _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "cache_read_input_tokens": _COUNT})
    fields = {"id": _TEXT, "type": {"const": "message"}, "content": _list(_FREE), "stop_reason": _TEXT, "usage": usage}
    return _object(fields, "id", "type", "content", "stop_reason", "usage")


def error_envelope() -> Schema:
    item = _object({"code": {"type": "integer"}, "message": _TEXT}, "code", "message")
    fields = {"success": {"const": False}, "errors": _list(item, minItems=1)}
    return _object(fields, "success", "errors")
