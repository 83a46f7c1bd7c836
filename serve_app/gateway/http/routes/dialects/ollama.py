"""Routes of Ollama's dialect, below /api."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.fields.asked import with_headers
from serve_app.api.fields.lora import with_lora
from serve_app.api.ollama import listing, read, write
from serve_app.api.schema import ollama as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import EmbedRequest, GenerateRequest, Usage
from serve_app.gateway.http.exchange import RUN, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.streams import streamed
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import taking

_TAG = "Ollama"
_CHAT, _EMBED = "@cf/pico/pico-instruct", "@cf/sentence-transformers/all-minilm-l6-v2"
_QUESTION = "What does math.sqrt do?"
CHAT = Operation(
    "Chat, as Ollama has it",
    _TAG,
    schemas.answer(),
    schemas.chat_input(),
    {"model": _CHAT, "messages": [{"role": "user", "content": _QUESTION}], "stream": False},
    streams=True,
    stream_type=write.MEDIA_TYPE,
)
GENERATE = Operation(
    "Answer a prompt, as Ollama has it",
    _TAG,
    schemas.answer(),
    schemas.generate_input(),
    {"model": _CHAT, "prompt": _QUESTION, "stream": False},
    streams=True,
    stream_type=write.MEDIA_TYPE,
)
EMBED = Operation(
    "Embeddings, as Ollama has them",
    _TAG,
    schemas.embed_output(),
    schemas.embed_input(),
    {"model": _EMBED, "input": ["one", "two"]},
)
EMBEDDINGS = Operation(
    "One embedding, as Ollama had it",
    _TAG,
    schemas.embeddings_output(),
    schemas.embeddings_input(),
    {"model": _EMBED, "prompt": "one"},
)
SHOW = Operation("One model, as Ollama shows it", _TAG, body=schemas.show_input(), example={"model": _CHAT})


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = OllamaRoutes(exchange)
    models = schemas.models_output()
    listed = [
        ("POST", "chat", routes.chat, CHAT),
        ("POST", "generate", routes.generate, GENERATE),
        ("POST", "embed", routes.embed, EMBED),
        ("POST", "embeddings", routes.embeddings, EMBEDDINGS),
        ("POST", "show", routes.show, SHOW),
        ("GET", "tags", routes.tags, Operation("The models, as Ollama lists them", _TAG, models)),
        ("GET", "ps", routes.running, Operation("The models that are ready, as Ollama lists them", _TAG, models)),
        ("GET", "version", routes.version, Operation("The version of Ollama's API", _TAG)),
    ]
    looks = {"show", "tags", "ps", "version"}
    return [
        Endpoint(method, f"/api/{name}", handler, about, write.error_body, USE if name in looks else RUN)
        for method, name, handler, about in listed
    ]


class OllamaRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat", "messages", read.parse_ollama_chat)

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, "generate", "prompt", read.parse_ollama_generate)

    async def _answer(self, request: Request, form: write.Form, field: str, parse: Any) -> Response:
        clock = write.Clock()
        body = await self._exchange.body(request, GenerateRequest)
        name = read.model_of(body)
        model, body = await self._exchange.model(request, name, GenerateRequest), with_lora(body, name)
        if read.only_loads(body, field):
            return json_answer(write.render_loaded(model.id, form))
        gateway = self._exchange.gateway
        parsed = with_headers(parse(body, model.id, gateway.limits(model)), request.headers)
        events = await gateway.generate(model, parsed, request.state.caller)
        if parsed.stream:
            return await streamed(
                events, lambda primed: write.stream_answer(model.id, form, primed, clock), media_type=write.MEDIA_TYPE
            )
        return json_answer(write.render_answer(model.id, form, [e async for e in events], clock))

    async def embed(self, request: Request) -> Response:
        clock = write.Clock()
        model, vectors, usage = await self._vectors(request, read.parse_ollama_embed)
        return json_answer(write.render_embed(model.id, vectors, usage, clock))

    async def embeddings(self, request: Request) -> Response:
        _, vectors, usage = await self._vectors(request, read.parse_ollama_embeddings)
        return json_answer(write.render_embedding(vectors, usage))

    async def _vectors(self, request: Request, parse: Any) -> tuple[ServedModel, Any, Usage]:
        body = await self._exchange.body(request, EmbedRequest)
        model = await self._exchange.model(request, read.model_of(body), EmbedRequest)
        parsed = parse(body, model.id)
        if parsed is None:
            return model, None, Usage()
        reading, usage = await self._exchange.gateway.perform(
            model, with_headers(parsed, request.headers), request.state.caller
        )
        return model, reading.dense, usage

    async def tags(self, request: Request) -> Response:
        return json_answer({"models": [_item(model) for model in self._exchange.gateway.models]})

    async def running(self, request: Request) -> Response:
        ready = [model for model in self._exchange.gateway.models if model.ready]
        return json_answer({"models": [listing.running(_item(model), model.window) for model in ready]})

    async def version(self, request: Request) -> Response:
        return json_answer({"version": write.API_VERSION})

    async def show(self, request: Request) -> Response:
        body = await self._exchange.body(request, GenerateRequest)
        model = self._exchange.gateway.models.find(read.model_of(body))
        record = model.record
        shown = listing.shown(
            _item(model),
            template=model.tokenizer.chat_templates.get("default", ""),
            license_=record.license or "",
            window=model.window,
            dimensions=record.properties.output_dimensions,
            capabilities=_capabilities(model),
        )
        return json_answer(shown)


def _item(model: ServedModel) -> dict[str, Any]:
    record = model.record
    return listing.listed(
        model.id,
        created_at=record.created_at,
        weights=record.weights.label,
        quantization=record.dtype if record.quantization == "none" else record.quantization,
        author=record.author,
    )


def _capabilities(model: ServedModel) -> list[str]:
    """What a model can do, in Ollama's words."""
    record = model.record

    def takes(kind: Any) -> bool:
        return record.task in (task.declaration.name for task in taking(kind))

    if takes(EmbedRequest):
        return ["embedding"]
    if not takes(GenerateRequest):
        return []
    tools = ["tools"] if record.tool_parser != "none" else []
    return ["completion", *tools, *(["thinking"] if record.reasoning_parser != "none" else [])]
