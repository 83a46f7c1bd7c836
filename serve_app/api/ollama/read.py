"""Reading Ollama's dialect: chats, prompts and texts to embed. They are put in OpenAI's words and read as such."""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.ranges import DIMENSIONS
from serve_app.api.fields.shorten import parse_shorten
from serve_app.api.fields.values import boolean, objects, refuse, string, text, texts
from serve_app.api.openai.read import MAX_INPUTS, parse_chat, parse_completions
from serve_app.api.types import EmbedRequest, GenerateRequest, ModelLimits, Shorten

# Ollama's options by OpenAI's names; those that are about loading a model, or that it has given up, change nothing.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_EFFORTS = ("low", "medium", "high")
MAX_MESSAGES = 4096


def model_of(body: dict[str, Any]) -> str:
    """The model that a body names, without the tag that Ollama's clients put behind names that have none."""
    name = string(body, "model", limit=512) or string(body, "name", limit=512)
    if not name:
        raise InvalidInput("model is missing; name one of GET /api/tags.", param="model")
    return name.removesuffix(":latest")


def wants_stream(body: dict[str, Any]) -> bool:
    """Ollama streams unless told not to."""
    return boolean(body, "stream") is not False


def only_loads(body: dict[str, Any], field: str) -> bool:
    """Whether there is nothing to answer: clients that load a model, or unload it, send no messages or no prompt."""
    return body.get(field) in (None, "", [])


def parse_ollama_chat(body: dict[str, Any], model: str, limits: ModelLimits) -> GenerateRequest:
    """`POST /api/chat`."""
    found = objects(body.get("messages"), "messages", limit=MAX_MESSAGES)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(found)]
    return parse_chat({**_common(body, model), "messages": messages, "tools": body.get("tools")}, limits)


def parse_ollama_generate(body: dict[str, Any], model: str, limits: ModelLimits) -> GenerateRequest:
    """`POST /api/generate`: a prompt that becomes a turn of the chat template, or goes in as it is (``raw``)."""
    for name in ("suffix", "template", "context"):
        if body.get(name) not in (None, "", []):
            raise InvalidInput(f"{name} is not supported; leave the field out.", param=name)
    prompt = text(body.get("prompt"), "prompt")
    asked = _common(body, model)
    if boolean(body, "raw"):
        if body.get("images"):
            raise InvalidInput("raw and images exclude each other: the chat template shows pictures.", param="images")
        logprobs = asked.get("top_logprobs") or 0 if asked.pop("logprobs", None) else None
        asked.pop("top_logprobs", None)
        [request] = parse_completions({**asked, "prompt": prompt, "logprobs": logprobs}, limits.of_chat)
        return request
    system = string(body, "system")
    messages = [{"role": "system", "content": system}] if system else []
    said = _with_images(body["images"], prompt, "images") if body.get("images") else prompt
    return parse_chat({**asked, "messages": [*messages, {"role": "user", "content": said}]}, limits)


def parse_ollama_embed(body: dict[str, Any], model: str) -> EmbedRequest | None:
    """`POST /api/embed`; long texts are cut unless ``truncate`` is false. None where there are no texts."""
    value = body.get("input")
    if value is None:
        raise InvalidInput("input is missing; send a string or an array of strings.", param="input")
    if value in ("", []):
        return None
    found = texts(value, "input", limit=MAX_INPUTS)
    if not all(found):
        raise InvalidInput("input must not hold an empty string.", param="input")
    return EmbedRequest(
        model,
        found,
        dimensions=DIMENSIONS.read(body, "dimensions"),
        shorten=parse_shorten(body, Shorten()),
        **parse_asked(body),
    )


def parse_ollama_embeddings(body: dict[str, Any], model: str) -> EmbedRequest | None:
    """`POST /api/embeddings`, the older form with one ``prompt``."""
    prompt = string(body, "prompt")
    return EmbedRequest(model, [prompt], shorten=Shorten(), **parse_asked(body)) if prompt else None


def _common(body: dict[str, Any], model: str) -> dict[str, Any]:
    options = body.get("options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise refuse("options", "an object", options)
    asked = {theirs: options[ours] for ours, theirs in _OPTIONS.items() if options.get(ours) is not None}
    limit = options.get("num_predict")
    # -1 and -2: as much as there is room for.
    if limit is not None and limit not in (-1, -2):
        asked["max_tokens"] = limit
    return {
        **asked,
        **_format(body.get("format")),
        **_think(body.get("think")),
        "model": model,
        "lora": body.get("lora"),
        # The one of our own options that fits among Ollama's.
        "options": {"estimate": options.get("estimate")},
        "stream": wants_stream(body),
        "logprobs": body.get("logprobs"),
        "top_logprobs": body.get("top_logprobs"),
    }


def _format(value: Any) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, dict):
        raise InvalidInput('format must be "json" or a JSON schema.', param="format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}}


def _think(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value, "thinking": value}}
    if value not in _EFFORTS:
        raise InvalidInput('think must be true, false, "low", "medium" or "high".', param="think")
    return {"reasoning_effort": value}


def _with_images(images: Any, said: Any, where: str) -> list[dict[str, Any]]:
    """Ollama's ``images``, base64 texts, as parts before the text."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise refuse(where, "an array of base64 strings", images)
    shown = [{"type": "image", "image": image} for image in images]
    return [*shown, {"type": "text", "text": said}] if said else shown


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    found = {name: message.get(name) for name in ("role", "content", "tool_calls", "tool_call_id")}
    if message.get("images"):
        found["content"] = _with_images(message["images"], message.get("content"), f"{where}.images")
    found["reasoning_content"] = message.get("thinking")
    found["name"] = message.get("tool_name")
    return {name: value for name, value in found.items() if value is not None}
