"""Routes about tokens, where vLLM has them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api import tokens
from serve_app.api.envelopes import openai_body
from serve_app.api.fields.content import TEXT_ONLY
from serve_app.api.schema import tokens as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import GenerateRequest
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.tasks.model import ServedModel
from serve_app.text.prompt import prompt_ids

_TAG = "Tokens"
_MODEL = "@cf/pico/pico-instruct"
TOKENIZE = Operation(
    "The tokens of a text or a conversation",
    _TAG,
    schemas.tokenize_output(),
    schemas.tokenize_input(),
    {"model": _MODEL, "prompt": "import os\n"},
)
DETOKENIZE = Operation(
    "The text of tokens",
    _TAG,
    schemas.detokenize_output(),
    schemas.detokenize_input(),
    {"model": _MODEL, "tokens": [5, 6]},
)
INFO = Operation("A model's tokenizer", _TAG, query={"model": {"type": "string"}})


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = TokenRoutes(exchange)
    return [
        Endpoint("POST", "/tokenize", routes.tokenize, TOKENIZE, openai_body),
        Endpoint("POST", "/detokenize", routes.detokenize, DETOKENIZE, openai_body),
        Endpoint("GET", "/tokenizer_info", routes.info, INFO, openai_body, USE),
    ]


class TokenRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def _model(self, request: Request, body: dict[str, Any]) -> ServedModel:
        """The model that ``body`` names, whatever its task; else the only one that generates text."""
        takes = GenerateRequest if not body.get("model") else None
        return await self._exchange.only_model(request, body, takes)

    async def tokenize(self, request: Request) -> Response:
        body = await self._exchange.body(request, GenerateRequest)
        model = await self._model(request, body)
        # A picture's tokens have no text.
        asked = tokens.parse_tokenize(body, model.id, replace(self._exchange.gateway.limits(model), takes=TEXT_ONLY))
        ids = (await asyncio.to_thread(_ids, model, asked)).tolist()
        strings = [model.tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
        return json_answer(tokens.render_tokenize(ids, strings, model.window))

    async def detokenize(self, request: Request) -> Response:
        body = await self._exchange.body(request, GenerateRequest)
        model = await self._model(request, body)
        ids = tokens.parse_detokenize(body, model.tokenizer.vocab_size)
        return json_answer({"prompt": await asyncio.to_thread(model.tokenizer.decode, ids, skip_special_tokens=False)})

    async def info(self, request: Request) -> Response:
        """The tokenizer's own configuration, its control tokens as plain strings."""
        tokenizer = (await self._model(request, dict(request.query_params))).tokenizer
        named = {name: None for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        found = {
            **{name: value for name, value in tokenizer.config.items() if name != "added_tokens_decoder"},
            **named,
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_templates.get("default"),
        }
        return json_answer({"tokenizer_class": "PreTrainedTokenizerFast", **found})


def _ids(model: ServedModel, asked: tokens.TokenizeRequest) -> np.ndarray:
    if asked.conversation is not None:
        return prompt_ids(model.tokenizer, asked.conversation)
    return model.tokenizer.encode_prompt(asked.text, add_special_tokens=asked.add_special_tokens)
