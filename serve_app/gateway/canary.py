"""Which version of a model answers a request: the model itself, or its canary for a share of them.

The choice is a function of the session where there is one, and of the request otherwise. So a session stays with its
version, in every gateway and over restarts; with a larger share more move there, and none comes back. A canary that is
not up answers nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from serve_app.api import identity
from serve_app.api.fields.asked import session_of
from serve_app.api.fields.lora import split_model
from serve_app.gateway.http import request_id
from serve_app.gateway.models import Models
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel


def version(
    models: Models, model: ServedModel, name: str, body: Mapping[str, Any], headers: Mapping[str, str], caller: Caller
) -> ServedModel:
    """What answers a request for ``model``, which it calls ``name``. One that is run again stays with its version;
    raises the error a client should see where that is not there. Batches have chosen for all their requests.
    """
    if identity.bound():
        before = identity.kept(_kept_as(model)) or model.id
        # Half an answer by one version is not gone on with by another; a batch's requests are whole.
        return models.find(before) if identity.again() else models.started.get(before, model)
    if model.id not in models.catalog.canaries:
        return model
    session = session_of(body, headers)
    which = f"s{caller.account}\0{session}" if session else f"r{request_id.current.get() or secrets.token_hex(16)}"
    chosen = drawn(models, model, draw(model.id, which), adapter=bool(body.get("lora") or split_model(name)[1]))
    if chosen is not model:
        identity.keep(_kept_as(model), chosen.id)
    return chosen


def drawn(models: Models, model: ServedModel, draw: float, *, adapter: bool) -> ServedModel:
    """``draw``: within 0 and 100. An ``adapter`` belongs to the weights that it was trained on."""
    canary = models.catalog.canaries.get(model.id)
    if canary is None or adapter or draw >= canary.percent:
        return model
    other = models.started.get(canary.model)
    return other if other is not None and (other.ready or other.scales_to_zero) else model


def for_batch(models: Models, model: ServedModel, draw: float, adapter: bool) -> tuple[ServedModel, dict[str, str]]:
    """:func:`drawn`, and what has requests of a batch find their version when they run (`identity.Identity.kept`)."""
    chosen = drawn(models, model, draw, adapter=adapter)
    return chosen, {} if chosen is model else {_kept_as(model): chosen.id}


def draw(model: str, which: str) -> float:
    """Evenly spread over 0 to 100, and the same for the same."""
    digest = blake2b(f"{model}\0{which}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64 * 100


def name_answer(models: Models, model: ServedModel, request: Any) -> None:
    """Has the answer name the version that made it."""
    asked = getattr(request, "model", "")
    if asked and models.get(asked) not in (None, model):
        request.model = model.id


def _kept_as(model: ServedModel) -> str:
    return f"canary {model.id}"
