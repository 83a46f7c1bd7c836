"""How soon this cluster would have a first token, as a line over lengths of prompts; and what its tokenizer is."""

from __future__ import annotations

import secrets
from hashlib import sha256

from serve_app.catalog.weights import tokenizer_directory
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.routing.neighbours import Line
from serve_app.routing.types import RouteRequest
from serve_app.tasks.model import ServedModel

# Prompts of two lengths make the line. Nothing of them is in a cache.
SHORT, LONG = 64, 2048
_FILES = ("tokenizer.json", "tokenizer_config.json")


async def line_ahead(model: ServedModel, dispatcher: Dispatcher, account: str) -> Line | None:
    """For requests of ``account`` that come now; None while the model cannot be served."""
    if not model.ready or not dispatcher.policy.workers.loads:
        return None
    waits, ttfts = [], []
    for tokens in (SHORT, LONG):
        probe = RouteRequest(secrets.token_hex(8), tokens, tenant=account, arrived_at=dispatcher.now())
        foreseen = await dispatcher.foresee(probe)
        if foreseen.ttft_s is None:
            return None
        waits.append(foreseen.wait_s or 0.0)
        ttfts.append(foreseen.ttft_s)
    token = max((ttfts[1] - ttfts[0]) / (LONG - SHORT), 0.0)
    wait = min(waits[0], ttfts[0])
    return Line(wait, max(ttfts[0] - wait - token * SHORT, 0.0), token)


def tokenizer_print(model: ServedModel) -> str:
    """The same where token ids mean the same. Reads files."""
    folder = tokenizer_directory(model.record.weights, model.home, model.source)
    digest = sha256()
    for name in _FILES:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
