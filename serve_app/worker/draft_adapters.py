"""Adapters of a draft model: what it drafts for a request with one of the model's adapters goes through its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.adapters.config import AdapterRefused
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, digest_of

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel

log = logging.getLogger(__name__)


def put_draft_adapters(pairs: Mapping[str, str], source: str, draft: CausalModel) -> dict[str, int]:
    """Puts the second of each of ``pairs``, directories that the record in ``source`` names, into a place of
    ``draft``. Returns the places by the digest of the first, the adapter of the model that is drafted for.

    One that can't be read costs its requests some drafts, and nobody an answer: it is left out.
    """
    from serve_app.catalog.errors import CatalogError
    from serve_app.catalog.load import weights_directory
    from serve_app.catalog.records import Weights

    places: dict[str, int] = {}
    for place, pair in enumerate(pairs.items(), start=1):
        try:
            own, drafting = (weights_directory(Weights(path=path), Path(source), "draft.lora") for path in pair)
            assert own is not None and drafting is not None and draft.adapters is not None
            read = draft.adapters.read((drafting / CONFIG).read_bytes(), drafting / WEIGHTS)
            draft.adapters.put(place, read)
            places[digest_of((own / CONFIG).read_bytes(), (own / WEIGHTS).read_bytes())] = place
        except (AdapterRefused, CatalogError, OSError) as error:
            log.warning("requests with the adapter in %s are drafted for without one: %s", pair[0], error)
    return places
