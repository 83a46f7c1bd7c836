"""The models this gateway can reach, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from serve_app.api.errors import LoraUnsupported, MalformedModel, ModelLoading, ModelNotStarted, UnknownModel
from serve_app.api.fields.lora import split_model
from serve_app.catalog.load import Catalog
from serve_app.tasks.model import ServedModel

_MODEL_ID = re.compile(r"@?[A-Za-z0-9][\w.:+-]*(/[A-Za-z0-9][\w.:+-]*)*", re.ASCII)


def up(model: ServedModel, name: str, *, here: bool = False) -> ServedModel:
    """``model``, which a request calls ``name``. Raises `ModelLoading`. ``here``: no other cluster will do."""
    if not model.ready and not model.scales_to_zero and (here or not model.elsewhere):
        told = name.removeprefix("workers-ai/")
        if model.detail.get("state") == "deploy_failed":
            raise ModelLoading(told, 2.0, "could not be started; GET /health says why")
        raise ModelLoading(told, 2.0)
    return model


class Models:
    """The catalogue as the gateway sees it: what is started in this profile, and what could be."""

    def __init__(self, catalog: Catalog, profile: str, only: tuple[str, ...], home: Path) -> None:
        self.catalog = catalog
        self.profile = profile
        self._only = only
        self._home = home
        self.started: dict[str, ServedModel] = {}
        self.adopt(catalog)

    def adopt(self, catalog: Catalog) -> list[ServedModel]:
        """``catalog`` is the catalogue from now on; the models that are new by that. One that goes on stays the object
        that it was, with whoever runs in it.
        """
        # A record that was added by hand may be named by the settings, and not be known yet.
        only = [model for model in self._only if model in catalog]
        found = catalog.started(self.profile, only) if only or not self._only else []  # type: ignore[arg-type]
        before, started, new = self.started, {}, []
        for record, chosen in found:
            model = before.get(record.id)
            if model is None or model.record != record:
                model = ServedModel(record, chosen, catalog.source(record.id), self._home)
                new.append(model)
            said = catalog.operated.get(record.id)
            model.profile, model.by_hand = chosen, said is not None and bool(said.running)
            started[record.id] = model
        self.started = started
        self.catalog.entries, self.catalog.operated = catalog.entries, catalog.operated
        self.catalog.problems, self.catalog.canaries = catalog.problems, catalog.canaries
        return new

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.started.values())

    def get(self, name: str) -> ServedModel | None:
        """The model called ``name``, its id or the id without ``@cf/``, if it is started here; with an adapter's name
        behind it (`fields.lora`) or without.
        """
        name, _ = split_model(name)
        return self.started.get(name) or self.started.get(f"@cf/{name.lstrip('/')}")

    def find(self, name: str, tasks: tuple[str, ...] = ()) -> ServedModel:
        """The model called ``name``: its id, or the id without ``@cf/``, or with a provider before it as the gateway's
        compat paths have it. Raises the error a client should see."""
        return up(self.named(name, tasks), name)

    def named(self, name: str, tasks: tuple[str, ...] = ()) -> ServedModel:
        """The same, ready or not."""
        name, adapter = split_model(name.removeprefix("workers-ai/"))
        if not _MODEL_ID.fullmatch(name):
            raise MalformedModel(name)
        model = self.get(name)
        if model is None:
            if name in self.catalog:
                remedy = f"The profile {self.profile} does not serve it; see SERVE_APP_PROFILE and SERVE_APP_MODELS."
                said = self.catalog.operated.get(name)
                if said is not None and not said.running and self.profile in self.catalog[name].serving:
                    remedy = "An operator can start it on the page Models, or by POST /ai/models/actions."
                raise ModelNotStarted(name, remedy)
            raise UnknownModel(name, tuple(m.id for m in self if not tasks or m.record.task in tasks))
        if tasks and model.record.task not in tasks:
            raise UnknownModel(name, tuple(m.id for m in self if m.record.task in tasks))
        if adapter and model.record.adapters is None:
            raise LoraUnsupported(model.id)
        return model
