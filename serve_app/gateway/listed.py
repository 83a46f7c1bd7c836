"""The catalogue as clients see it: searched, listed as OpenAI's models with the adapters of an account, and schemas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from serve_app.api import listing
from serve_app.api.errors import NotFound, StoreAway
from serve_app.api.fields.lora import split_model
from serve_app.api.types import ModelLimits
from serve_app.catalog.load import Catalog
from serve_app.catalog.search import search_record
from serve_app.catalog.tasks import declared
from serve_app.gateway.adapters import Adapters
from serve_app.gateway.models import Models
from serve_app.state.blobs.adapters import Adapter
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import tasks


class Listed:
    """What is started here. ``limits``: those of a started model."""

    def __init__(
        self, catalog: Catalog, models: Models, adapters: Adapters, limits: Callable[[ServedModel], ModelLimits]
    ) -> None:
        self._catalog = catalog
        self._models = models
        self._adapters = adapters
        self._limits = limits

    def search(self, query: dict[str, str]) -> dict[str, Any]:
        return listing.search(self._records(), query)

    def authors(self, query: dict[str, str]) -> dict[str, Any]:
        return listing.search_authors(self._records(), query)

    def tasks(self, query: dict[str, str]) -> dict[str, Any]:
        return listing.search_tasks(self._records(), query)

    def schema(self, name: str) -> dict[str, Any]:
        """Of a model's input, with an example, and output. Raises NotFound."""
        started = self._models.get(name)
        record = started.record if started is not None else self._catalog.get(name)
        if record is None:
            raise NotFound(f"No such model {name[:120]}. GET /ai/models/search lists the models.", param="model")
        found = tasks()[record.task].schema(self._limits(started) if started is not None else None)
        return {**found, "input": {**found["input"], "examples": [dict(declared()[record.task].example)]}}

    async def openai_models(self, account: str) -> dict[str, Any]:
        """The models, and the account's adapters as models of their own."""
        records = self._records()
        try:
            own = await self._adapters.listed(account)
        except StoreAway:
            own = []
        return listing.openai_models([*records, *(_of_adapter(records, each) for each in own if each.digest)])

    async def openai_model(self, account: str, name: str) -> dict[str, Any]:
        """One of them. Raises NotFound."""
        model, adapter = split_model(name)
        found = self._models.get(model)
        records = self._records()
        if found is not None and adapter:
            chosen = await self._adapters.seen(account, adapter)
            if chosen.digest and chosen.model == found.id:
                return listing.openai_model([_of_adapter(records, chosen)], f"{found.id}@{chosen.name}")
        return listing.openai_model(records, found.id if found is not None and not adapter else name)

    def _records(self) -> list[dict[str, Any]]:
        return [search_record(model.record) for model in self._models]


def _of_adapter(records: list[dict[str, Any]], adapter: Adapter) -> dict[str, Any]:
    """Its base model's record under the name that requests may use."""
    base = next((record for record in records if record["name"] == adapter.model), records[0])
    created = datetime.fromtimestamp(adapter.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return {**base, "name": f"{adapter.model}@{adapter.name}", "created_at": created}
