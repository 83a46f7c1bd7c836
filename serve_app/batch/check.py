"""Whether one request of a batch would be taken by the route it is for: its dialect's own parser, with its model's
limits.

Most requests of a batch differ in nothing but the prompt. So what a body says beside it is parsed once for each
distinct wording, and of the others only the prompt is looked at. Whatever is not plain there goes to the parser.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from serve_app.api.anthropic.read import parse_messages_request
from serve_app.api.errors import ApiError, BodyTooLarge, InvalidInput, NoRoute
from serve_app.api.fields.body import parse_body
from serve_app.api.fields.lora import split_model, with_lora
from serve_app.api.openai.read import model_of, parse_chat, parse_completions, parse_embeddings
from serve_app.api.rerank.read import parse_rerank, parse_score
from serve_app.api.responses.read import parse_responses
from serve_app.api.types import EmbedRequest, GenerateRequest, ModelLimits, RerankRequest, TaskRequest
from serve_app.batch.order import NOTHING, digests
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import body_limit, taking, tasks
from serve_app.tasks.task import Body, BodyLimits

# How many wordings are remembered.
MAX_WORDINGS = 4096
_ROLES = frozenset({"system", "user", "assistant", "developer"})
_NAME = re.compile(r"\W")
_RUN = re.compile(r"/client/v4/accounts/[^/]+/ai/run/(?P<model>.+)")


@dataclass(slots=True, frozen=True)
class Known:
    """What a gateway knows of models. ``find``: a model by name, of one of some tasks, ready or not; raises `ApiError`.
    ``allow``: raises one for a model that the caller may not use. ``most``: requests of a batch. ``bodies``: bounds of
    each. ``adapter``: looks up the one that requests of the caller name, as `Request.kept` has it; raises `ApiError`,
    and `Away`. ``version``: which version of a model a batch runs on, by a number from 0 to 100 that was drawn for it
    and whether requests name an adapter; and what is kept of that.
    """

    find: Callable[[str, tuple[str, ...]], ServedModel]
    limits: Callable[[ServedModel], ModelLimits]
    allow: Callable[[Caller, ServedModel], None]
    bodies: BodyLimits
    most: int = 50_000
    adapter: Callable[[ServedModel, Caller, str], dict[str, str]] = lambda model, caller, which: {}
    version: Callable[[ServedModel, float, bool], tuple[ServedModel, dict[str, str]]] = lambda model, *_: (model, {})

    @property
    def longest(self) -> int:
        """Bytes of one request, with what stands around its body; files are as small in batches as texts."""
        return max(self.bodies.max_body_bytes, self.bodies.max_embedding_body_bytes) + 4096


@dataclass(slots=True, frozen=True)
class Checked:
    """``begins``: see :func:`serve_app.batch.order.digests`. ``prompt``: bytes of it. ``kept``: of the request."""

    model: ServedModel
    begins: bytes
    prompt: int
    kept: dict[str, str]


class NoModel(Exception):
    """A request for a model that is not here, or not for this caller; ``error`` says why."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True, frozen=True)
class _Form:
    """How bodies of one route are read. ``varying``: fields that hold the prompt."""

    takes: type[TaskRequest]
    parse: Callable[[dict[str, Any], str, ModelLimits], list[Any]]
    varying: tuple[str, ...]


def _responses(body: dict[str, Any], model: str, limits: ModelLimits) -> list[Any]:
    if body.get("background"):
        raise InvalidInput("background: a batch runs in the background by itself; leave it out.", param="background")
    # What a template or a stored conversation adds is known when it runs.
    waits = any(body.get(name) is not None for name in ("prompt", "previous_response_id", "conversation"))
    items = body.get("input")
    waits |= isinstance(items, list) and any(isinstance(item, dict) and "id" in item for item in items)
    return [] if waits else [parse_responses(body, limits).generate]


FORMS: dict[str, _Form] = {
    "/v1/chat/completions": _Form(GenerateRequest, lambda b, m, limits: [parse_chat(b, limits)], ("messages",)),
    "/v1/completions": _Form(GenerateRequest, lambda b, m, limits: list(parse_completions(b, limits)), ("prompt",)),
    "/v1/responses": _Form(GenerateRequest, _responses, ("input", "instructions")),
    "/v1/embeddings": _Form(EmbedRequest, lambda b, m, limits: [parse_embeddings(b)], ("input",)),
    "/v1/rerank": _Form(RerankRequest, lambda b, m, limits: [parse_rerank(b, m)], ("query", "documents")),
    "/v2/rerank": _Form(RerankRequest, lambda b, m, limits: [parse_rerank(b, m)], ("query", "documents")),
    "/v1/score": _Form(RerankRequest, lambda b, m, limits: [parse_score(b, m)], ()),
    "/v1/messages": _Form(
        GenerateRequest, lambda b, m, limits: [parse_messages_request(b, limits)], ("messages", "system")
    ),
}
# Of native bodies, whatever their task.
_NATIVE = ("prompt", "messages", "text", "query")


@dataclass(slots=True)
class Checker:
    """Checks the requests of one batch. ``caller``: who sent it."""

    known: Known
    caller: Caller
    # One for all requests: those for one model run on one version of it.
    _draw: float = field(default_factory=lambda: 100 * random.random())
    _models: dict[tuple[str, type[TaskRequest] | None, bool], tuple[ServedModel, dict[str, str]]] = field(
        default_factory=dict
    )
    _limits: dict[str, ModelLimits] = field(default_factory=dict)
    # What is known of each: its model and what is kept of it, or why it is refused.
    _wordings: dict[tuple[str, bytes], tuple[ServedModel, dict[str, str]] | InvalidInput] = field(default_factory=dict)
    _adapters: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def check(self, url: str, raw: bytes) -> Checked:
        """Raises `ApiError` for what the route would refuse, `NoModel`, and `Away`."""
        form = FORMS.get(url)
        varying = form.varying if form is not None else _NATIVE
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = parse_body(raw)  # says what is wrong
        if not isinstance(body, dict):
            raise InvalidInput("The body must be a JSON object.", param="body")
        key = (url, _wording(body, varying))
        known = self._wordings.get(key)
        if known is None:
            if len(self._wordings) >= MAX_WORDINGS:
                self._wordings.clear()
            try:
                model, kept, parsed = self._parsed(url, form, raw)
            except InvalidInput as error:
                # What is wrong with the prompt of one is wrong with no other.
                if error.param is not None and _NAME.split(error.param, 1)[0] in body.keys() - set(varying):
                    self._wordings[key] = error
                raise
            known = self._wordings[key] = model, kept | self._kept(model, parsed)
        if isinstance(known, InvalidInput):
            raise known.with_traceback(None)
        model, kept = known
        limit = body_limit(model, self.known.bodies)
        if len(raw) > limit:
            raise BodyTooLarge(limit)
        return _checked(model, body, kept)

    def read(self, url: str, raw: bytes) -> list[Any]:
        """The pieces of work that a request is. Raises like :meth:`check`."""
        return self._parsed(url, FORMS.get(url), raw)[2]

    def _parsed(self, url: str, form: _Form | None, raw: bytes) -> tuple[ServedModel, dict[str, str], list[Any]]:
        """The model, what is kept of which version it is, and the pieces of work."""
        body = parse_body(raw)
        if form is not None:
            model, kept = self._model(model_of(body)[0], form.takes, body)
            parsed = form.parse(body, model.id, self._limits_of(model))
        else:
            run = _RUN.fullmatch(url)
            if run is None:
                raise NoRoute("POST", url)
            model, kept = self._model(run["model"], None, body)
            parsed = [
                tasks()[model.record.task].read(Body(with_lora(body, run["model"])), model, self._limits_of(model))
            ]
        for request in parsed:
            if getattr(request, "stream", False):
                raise InvalidInput("stream: requests of a batch are answered as a whole; leave it out.", param="stream")
            if request.estimate:
                raise InvalidInput("options.estimate is for the batch as a whole, not for one of it.", param="options")
        return model, kept, parsed

    def _model(
        self, name: str, takes: type[TaskRequest] | None, body: dict[str, Any]
    ) -> tuple[ServedModel, dict[str, str]]:
        adapter = bool(body.get("lora") or split_model(name)[1])
        found = self._models.get((name, takes, adapter))
        if found is None:
            fitting = () if takes is None else tuple(task.declaration.name for task in taking(takes))
            try:
                model = self.known.find(name, fitting)
                self.known.allow(self.caller, model)
                found = self.known.version(model, self._draw, adapter)
            except ApiError as error:
                raise NoModel(error) from None
            if len(self._models) < MAX_WORDINGS:
                self._models[name, takes, adapter] = found
        return found

    def _kept(self, model: ServedModel, parsed: list[Any]) -> dict[str, str]:
        """The same adapter, in the same version, for all of a batch."""
        which = next((request.lora for request in parsed if getattr(request, "lora", "")), "")
        if not which:
            return {}
        if (model.id, which) not in self._adapters:
            if len(self._adapters) >= MAX_WORDINGS:
                raise InvalidInput(f"A batch names at most {MAX_WORDINGS} adapters; send several.", param="lora")
            self._adapters[model.id, which] = self.known.adapter(model, self.caller, which)
        return self._adapters[model.id, which]

    def _limits_of(self, model: ServedModel) -> ModelLimits:
        if model.id not in self._limits:
            self._limits[model.id] = self.known.limits(model)
        return self._limits[model.id]


def _wording(body: dict[str, Any], varying: tuple[str, ...]) -> bytes:
    """What a body says beside its prompt, and which kind of prompt it has: any other of that kind is as good. What is
    not plain stays as it is.
    """
    rest, kinds = dict(body), []
    for name in varying:
        kind = _kind(rest.get(name))
        kinds.append(kind)
        if kind is not None:
            del rest[name]
    # Any seed in its range is as good as any other.
    if type(rest.get("seed")) is int and 0 <= rest["seed"] < 2**63:
        rest["seed"] = 0
    found = orjson.dumps((kinds, rest))
    return found if len(found) <= 256 else blake2b(found, digest_size=32).digest()


def _kind(value: Any) -> str | None:
    """Of text that is not empty, of an array of such texts, and of messages of text; None: something else."""
    if type(value) is str:
        return "text" if value else None
    if type(value) is not list or not value:
        return None
    if type(value[0]) is str:
        return f"{len(value)} texts" if all(type(item) is str and item for item in value) else None
    roles = ""
    for turn in value:
        if type(turn) is not dict or len(turn) != 2 or type(turn.get("content")) is not str:
            return None
        role = turn.get("role")
        if role not in _ROLES:
            return None
        roles += role[0]
    return roles


def _checked(model: ServedModel, body: dict[str, Any], kept: dict[str, str]) -> Checked:
    """``body`` with what its prompt begins with. Only prompts that something is generated for are cached."""
    prompt = next((body[name] for name in ("messages", "prompt", "input") if body.get(name) is not None), None)
    ahead = (body.get("tools"), body.get("system") or body.get("instructions"))
    written = orjson.dumps((ahead, prompt))
    if not issubclass(GenerateRequest, tasks()[model.record.task].takes):
        return Checked(model, NOTHING, len(written), kept)
    if type(prompt) is list and len(prompt) > 1:
        head = orjson.dumps((ahead, prompt[0]))
    else:
        head = orjson.dumps(ahead) if ahead != (None, None) else b""
    return Checked(model, digests(head, written), len(written), kept)
