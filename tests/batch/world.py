"""What the pieces of batches need in tests: models without a tokenizer, and files in a folder."""

from __future__ import annotations

from pathlib import Path

from serve_app.api.types import ModelLimits
from serve_app.batch.check import Known
from serve_app.catalog.load import load_catalog
from serve_app.gateway.models import Models
from serve_app.gateway.settings import GatewaySettings

CHAT, EMBED, RERANK = "@cf/pico/pico-instruct", "@cf/sentence-transformers/all-minilm-l6-v2", "@cf/pico/pico-reranker"


def known(home: Path, most: int = 50_000) -> Known:
    models = Models(load_catalog(home), "local", (), home)
    settings = GatewaySettings("local", (), "s", str(home), "local")
    limits = ModelLimits(vocab_size=4096, context_window=2048)
    return Known(models.named, lambda model: limits, lambda caller, model: None, settings, most)
