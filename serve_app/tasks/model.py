"""A model as a gateway serves it: record, tokenizer, handle, and how busy it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.api.errors import OutOfCapacity
from serve_app.api.fields.content import HEARS, SEES, TEXT_ONLY, PartKind
from serve_app.api.types import ModelLimits
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.catalog.weights import tokenizer_directory
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.places import Places
from serve_app.text.tokenizer import Tokenizer


def application_name(model: str) -> str:
    """The Serve application that runs a model: its id without what Serve's names can't hold."""
    return model.lstrip("@").replace("/", "--")


@dataclass(slots=True)
class ServedModel:
    """One model of the profile. ``ready`` and ``detail`` are kept by :mod:`serve_app.gateway.health`. ``by_hand``: an
    operator has started it, and the server is ready without it.
    """

    record: ModelRecord
    profile: Profile
    source: Path
    home: Path
    ready: bool = False
    by_hand: bool = False
    # Another cluster that requests may be passed to serves it (:mod:`serve_app.gateway.neighbours`).
    elsewhere: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    # Moving average of how long a request holds its place, for Retry-After.
    seconds_per_request: float = 1.0
    _handles: dict[str, Any] = field(default_factory=dict)
    _tokenizer: Tokenizer | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def inflight(self) -> int:
        """Streams that this gateway has of the model."""
        return self.places.taken

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
    def window(self) -> int | None:
        """Tokens that the model takes at once, whatever its task."""
        properties = self.record.properties
        return properties.context_window or properties.max_input_tokens

    @property
    def takes(self) -> frozenset[PartKind]:
        """What may stand in its conversations."""
        properties = self.record.properties
        return TEXT_ONLY | (SEES if properties.vision else TEXT_ONLY) | (HEARS if properties.hearing else TEXT_ONLY)

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
            takes=self.takes,
            lora=self.record.adapters is not None,
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
    def place(self, caller: Caller, limit: int, *, streams: int = 1, reject_if_busy: bool = False) -> Iterator[None]:
        """Holds the caller's places of this model in the gateway, one per stream, or refuses with 429 at once.

        A request whose account has no other may have more streams than there are places: it would never fit otherwise.
        """
        account, inflight = caller.account, self.inflight
        busy = reject_if_busy and inflight > 0 and inflight + streams > self.slots
        if busy or not self.places.take(account, caller.weight, streams, limit):
            waiting = max(1, inflight + streams - self.slots)
            raise OutOfCapacity(retry_after=max(1.0, waiting * self.seconds_per_request / self.slots))
        started = time.monotonic()
        try:
            yield
        finally:
            self.places.give_back(account, streams)
            self.seconds_per_request += 0.1 * (time.monotonic() - started - self.seconds_per_request)
