"""How each API writes one request of a batch, and what it asks of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from serve_app.api.anthropic.write import error_body as anthropic_body
from serve_app.api.envelopes import envelope, openai_body
from serve_app.api.errors import ApiError
from serve_app.batch.check import FORMS
from serve_app.state.deferred.batches import Request

MAX_ID = 512
# What a batch of OpenAI's may be for.
ENDPOINTS: tuple[str, ...] = tuple(url for url in FORMS if url != "/v1/messages")
_ANTHROPIC_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)


class Malformed(ValueError):
    """What is no request at all. ``code``: as OpenAI calls it."""

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(slots=True, frozen=True)
class BatchApi:
    """``request``: the request with a number, read from its JSON; raises `Malformed`. ``strict``: one request that is
    none, or that asks for a model that is not here, spoils the batch; otherwise it has that error as its result.
    ``unique``: ids are.
    """

    request: Callable[[int, bytes], Request]
    error_body: Callable[[ApiError], dict[str, Any]]
    native: bool = False
    strict: bool = False
    unique: bool = False


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Item(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


_LINES = msgspec.json.Decoder(_Line)
_ITEMS = msgspec.json.Decoder(_Item)
_PLACE = re.compile(r" - at `\$\.?(.*)`")


def openai_api(endpoint: str) -> BatchApi:
    """Lines of a file, all for one ``endpoint``."""

    def request(number: int, raw: bytes) -> Request:
        line = _read(_LINES, raw)
        if not 0 < len(line.custom_id) <= MAX_ID or "\0" in line.custom_id:
            message = f"custom_id must have 1 to {MAX_ID} characters, none of them NUL."
            raise Malformed(message, "invalid_custom_id", "custom_id")
        if line.method != "POST":
            raise Malformed(f'method must be "POST", not "{line.method[:16]}".', "invalid_method", "method")
        if line.url != endpoint:
            message = f"url is {line.url[:80]}, and the batch is for {endpoint}; a batch has one endpoint."
            raise Malformed(message, "invalid_url", "url")
        return Request(number, line.custom_id, endpoint, bytes(line.body))

    return BatchApi(request, openai_body, strict=True, unique=True)


def anthropic_api(*, checked: bool = False) -> BatchApi:
    """Items of `requests`. ``checked``: :func:`anthropic_id` has seen each of them."""

    def request(number: int, raw: bytes) -> Request:
        item = _read(_ITEMS, raw)
        _check_anthropic_id(item.custom_id)
        return Request(number, item.custom_id, "/v1/messages", bytes(item.params))

    return BatchApi(request, anthropic_body, strict=not checked, unique=not checked)


def anthropic_id(raw: bytes) -> str:
    """The id of one item. Raises `Malformed`."""
    found = _read(_ITEMS, raw).custom_id
    _check_anthropic_id(found)
    return found


def native_api(account: str, model: str) -> BatchApi:
    """Items of `requests`, all for one ``model``."""
    url = f"/client/v4/accounts/{account}/ai/run/{model}"

    def request(number: int, raw: bytes) -> Request:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise Malformed(f"it is not valid JSON: {error}.", "invalid_json") from None
        if not isinstance(body, dict):
            raise Malformed("it must be an object with the model's inputs.")
        reference = body.pop("external_reference", None)
        fits = reference is None or (isinstance(reference, str) and len(reference) <= MAX_ID and "\0" not in reference)
        if not fits:
            message = f"external_reference must be a string of at most {MAX_ID} characters, none of them NUL."
            raise Malformed(message, param="external_reference")
        # Answers are whole, whatever a body that was written for a single request says.
        plain = {name: value for name, value in body.items() if name not in ("stream", "queueRequest")}
        return Request(number, reference, url, orjson.dumps(plain))

    return BatchApi(request, envelope, native=True)


def _check_anthropic_id(found: str) -> None:
    if not _ANTHROPIC_ID.fullmatch(found):
        raise Malformed("custom_id must be 1 to 64 letters, digits, - and _.", param="custom_id")


def _read(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        message = _PLACE.sub("", str(error))
        param = place[1] if place and place[1] else None
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            raise Malformed(f"{missing[1]} is missing.", "missing_required_parameter", missing[1]) from None
        raise Malformed(f"{param or 'it'}: {message}.", "invalid_type", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"it is not valid JSON: {error}.", "invalid_json_line") from None
