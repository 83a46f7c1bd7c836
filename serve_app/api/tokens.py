"""vLLM's `/tokenize` and `/detokenize`: what a text or a conversation is to a model, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.sampling import parse_token_ids
from serve_app.api.fields.values import boolean, string
from serve_app.api.openai.read import parse_chat
from serve_app.api.types import GenerateRequest, ModelLimits


@dataclass(slots=True, frozen=True)
class TokenizeRequest:
    """``text`` as it stands, control tokens in it counting as such; or the prompt of a ``conversation``."""

    text: str = ""
    conversation: GenerateRequest | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


def parse_tokenize(body: dict[str, Any], model: str, limits: ModelLimits) -> TokenizeRequest:
    """``prompt``, or ``messages`` with what else a chat has that its template sees."""
    strings = bool(boolean(body, "return_token_strs"))
    added = boolean(body, "add_special_tokens")
    if body.get("messages") is None:
        text = string(body, "prompt")
        if text is None:
            raise InvalidInput("Send prompt (a string) or messages (an array of {role, content}).", param="prompt")
        return TokenizeRequest(text, None, added is not False, strings)
    if body.get("prompt") is not None:
        raise InvalidInput("prompt and messages exclude each other; send one of them.", param="prompt")
    if added:
        message = "add_special_tokens: a chat template writes its own; leave the field out with messages."
        raise InvalidInput(message, param="add_special_tokens")
    return TokenizeRequest("", parse_chat({**body, "model": model}, limits), False, strings)


def render_tokenize(ids: Sequence[int], strings: Sequence[str] | None, context_window: int | None) -> dict[str, Any]:
    return {
        "count": len(ids),
        "max_model_len": context_window,
        "tokens": list(ids),
        "token_strs": None if strings is None else list(strings),
    }


def parse_detokenize(body: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    if body.get("tokens") is None:
        raise InvalidInput("tokens is missing; send an array of token ids.", param="tokens")
    return parse_token_ids(body["tokens"], "tokens", vocab_size)
