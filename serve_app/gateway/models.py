"""The models this gateway can reach: record, tokenizer, handle, and how busy each is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.api.errors import MalformedModel, ModelLoading, ModelNotStarted, OutOfCapacity, UnknownModel
from serve_app.api.types import ModelLimits
from serve_app.catalog.load import Catalog
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.catalog.weights import tokenizer_directory
from serve_app.text.tokenizer import Tokenizer

_MODEL_ID = re.compile(r"@?[A-Za-z0-9][\w.:+-]*(/[A-Za-z0-9][\w.:+-]*)*", re.ASCII)


def application_name(model: str) -> str:
    """The Serve application that runs a model: its id without what Serve's names can't hold."""
    return model.lstrip("@").replace("/", "--")


@dataclass(slots=True)
class ServedModel:
    """One model of the profile. ``ready`` and ``detail`` are kept by :mod:`serve_app.gateway.health`."""

    record: ModelRecord
    profile: Profile
    source: Path
    home: Path
    ready: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    inflight: int = 0
    # Moving average of how long a request holds its place, for Retry-After.
    seconds_per_request: float = 1.0
    _handles: dict[str, Any] = field(default_factory=dict)
    _tokenizer: Tokenizer | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def scales_to_zero(self) -> bool:
        return next(iter(self.profile.stages.values())).min_replicas == 0

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(tokenizer_directory(self.record.weights, self.home, self.source))
        return self._tokenizer

    @property
    def context_window(self) -> int | None:
        return self.record.properties.context_window

    @property
    def limits(self) -> ModelLimits:
        defaults = self.record.defaults
        return ModelLimits(
            default_max_tokens=defaults.max_tokens,
            default_chat_tokens=defaults.chat_max_tokens,
            context_window=self.context_window,
            vocab_size=self.tokenizer.vocab_size,
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    @property
    def slots(self) -> int:
        """Requests that run at the same time when every replica is there."""
        first = next(iter(self.profile.stages.values()))
        return first.max_num_seqs * first.max_replicas

    @property
    def first_stage(self) -> str:
        """The stage that requests are sent to."""
        return next(iter(self.profile.stages))

    def handle(self, connect: Callable[[str, str], Any], stage: str = "") -> Any:
        """``connect(deployment, application)``, once per stage; by default the stage that requests are sent to."""
        stage = stage or self.first_stage
        if stage not in self._handles:
            self._handles[stage] = connect(stage.capitalize(), application_name(self.id))
        return self._handles[stage]

    @contextmanager
    def place(self, limit: int, *, reject_if_busy: bool = False) -> Iterator[None]:
        """Holds one of the gateway's places for this model, or refuses with 429 at once."""
        if self.inflight >= (self.slots if reject_if_busy else limit):
            waiting = max(1, self.inflight - self.slots + 1)
            raise OutOfCapacity(retry_after=max(1.0, waiting * self.seconds_per_request / self.slots))
        self.inflight += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.inflight -= 1
            self.seconds_per_request += 0.1 * (time.monotonic() - started - self.seconds_per_request)


class Models:
    """The catalogue as the gateway sees it: what is started in this profile, and what could be."""

    def __init__(self, catalog: Catalog, profile: str, only: tuple[str, ...], home: Path) -> None:
        self.catalog = catalog
        self.profile = profile
        self.started = {
            record.id: ServedModel(record, chosen, catalog.source(record.id), home)
            for record, chosen in catalog.started(profile, only)  # type: ignore[arg-type]
        }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.started.values())

    def task_of(self, name: str) -> str:
        """The task of a model, or "" for one that is not started here."""
        model = self.get(name)
        return model.record.task if model is not None else ""

    def get(self, name: str) -> ServedModel | None:
        """The model called ``name``, its id or the id without ``@cf/``, if it is started here."""
        return self.started.get(name) or self.started.get(f"@cf/{name.lstrip('/')}")

    def find(self, name: str, tasks: tuple[str, ...] = ()) -> ServedModel:
        """The model called ``name``: its id, or the id without ``@cf/``, or with a provider before it as the gateway's
        compat paths have it. Raises the error a client should see."""
        name = name.removeprefix("workers-ai/")
        if not _MODEL_ID.fullmatch(name):
            raise MalformedModel(name)
        model = self.get(name)
        if model is None:
            if name in self.catalog:
                remedy = f"The profile {self.profile} does not serve it; see SERVE_APP_PROFILE and SERVE_APP_MODELS."
                raise ModelNotStarted(name, remedy)
            raise UnknownModel(name, tuple(m.id for m in self if not tasks or m.record.task in tasks))
        if tasks and model.record.task not in tasks:
            raise UnknownModel(name, tuple(m.id for m in self if m.record.task in tasks))
        if not model.ready and not model.scales_to_zero:
            raise ModelLoading(name, retry_after=2.0)
        return model
