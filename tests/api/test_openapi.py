"""The published description: complete, valid, and in step with what the readers check."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from serve_app.api.anthropic import read as anthropic
from serve_app.api.errors import (
    AccountForbidden,
    ApiError,
    AuthError,
    BodyTooLarge,
    BudgetSpent,
    ContextTooLong,
    HeadersTooLarge,
    Internal,
    LoraUnsupported,
    MalformedModel,
    MissingBody,
    ModelLoading,
    NoRoute,
    OutOfCapacity,
    PaidPlanNeeded,
    RateLimited,
    Timeout,
    UnknownModel,
)
from serve_app.api.openai import read as openai
from serve_app.api.responses import read as responses
from serve_app.api.schema import dialects as schemas_dialects
from serve_app.api.schema.openapi import ERRORS, document
from serve_app.api.types import ModelLimits
from serve_app.gateway.http.app import endpoints
from serve_app.gateway.http.routes.dialects.native import run_operation
from serve_app.tasks.text_generation.read import parse_generate

ENDPOINTS = endpoints(None)  # type: ignore[arg-type]
DOCUMENT = document(((e.method, e.path, e.about, e.scopes is not None) for e in ENDPOINTS), "1.0")


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, about) for path, methods in DOCUMENT["paths"].items() for method, about in methods.items()]


def test_every_route_is_described_once():
    assert len(operations()) == len(ENDPOINTS) == len({(e.method, e.path) for e in ENDPOINTS})
    ids = [about["operationId"] for _, _, about in operations()]
    assert len(set(ids)) == len(ids)
    for path, _, about in operations():
        named = {p["name"] for p in about["parameters"] if p["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path)), path
    orjson.dumps(DOCUMENT)


def test_every_dialect_is_described():
    described = {about["tags"][0] for _, _, about in operations()}
    openai = {"OpenAI", "OpenAI Responses", "OpenAI Conversations"}
    dialects = {"Workers AI", *openai, "Anthropic", "Reranking", "Tokens", "Ollama"}
    batches = {"Batches", "OpenAI Batches", "Anthropic Batches", "Queues", "Fine-tunes"}
    assert described == {
        "Server",
        "Dashboard",
        "Metrics",
        "Catalogue",
        "Models by hand",
        "Requests",
        "Accounts",
        "Usage",
        "Webhooks",
        "Documents",
        *batches,
        *dialects,
    }


@pytest.mark.parametrize(("path", "method", "about"), operations(), ids=lambda value: str(value)[:60])
def test_bodies_and_examples(path, method, about):
    for status in about["responses"].values():
        for media in status.get("content", {}).values():
            if "schema" in media and "$ref" not in media["schema"]:
                Draft202012Validator.check_schema(media["schema"])
    body = about.get("requestBody")
    assert (body is not None) == (
        method in ("post", "put", "patch") and not path.endswith(("/cancel", "/value", "/retry", "/versions"))
    )
    if body is not None:
        (media,) = body["content"].values()
        Draft202012Validator.check_schema(media["schema"])
        Draft202012Validator(media["schema"]).validate(media["example"])


@pytest.mark.parametrize(
    "error",
    [
        UnknownModel("m"), MalformedModel("m"), MissingBody(),
        LoraUnsupported("m"), ContextTooLong(1, 1, 1), BodyTooLarge(1), AuthError(),
        AccountForbidden("a"), NoRoute("GET", "/"), OutOfCapacity(), ModelLoading("m"), Timeout(), Internal(),
        HeadersTooLarge(1), RateLimited("t", 1, {}), BudgetSpent("t", 1), PaidPlanNeeded("m", "a"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_every_status_an_error_has_is_described(error: ApiError):
    assert error.status in ERRORS
    keyed = [about for _, _, about in operations() if about["security"]]
    assert keyed and all(str(error.status) in about["responses"] for about in keyed)
    # Whoever is told to come back is told when.
    assert (error.status in (429, 503)) == ("Retry-After" in error.headers)


SAID = [{"role": "user", "content": "x"}]
# The description is of models that take whatever a model may take.
LIMITS = ModelLimits(lora=True)
READERS = [
    (schemas_dialects.chat_input(), partial(openai.parse_chat, limits=LIMITS), {"model": "m", "messages": SAID}),
    (
        schemas_dialects.completion_input(),
        partial(openai.parse_completions, limits=LIMITS),
        {"model": "m", "prompt": "x"},
    ),
    (schemas_dialects.embeddings_input(), openai.parse_embeddings, {"model": "m", "input": "x"}),
    (
        schemas_dialects.responses_input(),
        partial(responses.parse_responses, limits=LIMITS),
        {"model": "m", "input": "x"},
    ),
    (
        schemas_dialects.messages_input(),
        partial(anthropic.parse_messages_request, limits=LIMITS),
        {"model": "m", "max_tokens": 5, "messages": SAID},
    ),
    # Text generation's part of it: a prompt is what other tasks call their input, too.
    ({"anyOf": run_operation().body["anyOf"][:1]}, partial(parse_generate, model="m", limits=LIMITS), {"prompt": "x"}),
]
WRONG = ["x", -1, 10**12, 1.5, True, [], {}, [5], {"a": 5}]


@pytest.mark.parametrize(
    ("schema", "parse", "good"), READERS, ids=["chat", "completion", "embed", "responses", "messages", "run"]
)
def test_what_the_description_takes_the_reader_takes(schema, parse, good):
    """Any value of any described field: what the schema allows is not refused by the reader."""
    validator = Draft202012Validator(schema)
    validator.validate(good)
    parse(good)
    fields = schema.get("properties") or schema["anyOf"][0]["oneOf"][0]["properties"]
    checked = 0
    for name in fields:
        for value in WRONG:
            body = {**good, name: value}
            # Items of lists and free objects are described loosely; seeds are checked by their own test.
            if isinstance(value, (list, dict)) or not validator.is_valid(body):
                continue
            if name == "top_logprobs" and value:
                body["logprobs"] = True
            parse(body)
            checked += 1
    assert checked > 1
