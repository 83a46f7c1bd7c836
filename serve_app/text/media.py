"""Files in conversations, pictures and sounds, as a prompt has them: as many placeholder tokens as the model's encoder
will have features for each.

::

    rendered    Look: <mark> What is it?
    expanded    Look: <begin><p><p><p><end> What is it?       what the rule of the medium writes for the mark
    placed             tokens 4, 5, 6                         where features stand in place of embeddings

How many follows from the file by the rules of the model's own processor (`serve_app.text.pictures`,
`serve_app.text.sounds`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.content import Medium

# As people call them.
NOUNS: dict[Medium, str] = {"image": "pictures", "audio": "sounds"}

Places = tuple[tuple[int, int], ...]


class NoMedia(ValueError):
    """The model takes none of a medium here; the text says why."""


@dataclass(slots=True, frozen=True)
class MediaFile:
    """A file that has been looked at. ``digest``: of its bytes."""

    medium: ClassVar[Medium]
    data: bytes
    digest: bytes


@dataclass(slots=True, frozen=True)
class Placed:
    """``places``: (first token, count) of each run of placeholders that its features stand for, in their order.
    ``grid``: rows and columns of these, where the positions of what follows depend on it."""

    file: MediaFile
    places: Places
    grid: tuple[int, int] | None = None
    beside: bool = False  # see `MediaRule`


@dataclass(slots=True, frozen=True)
class MediaRule(ABC):
    """Of one model and medium. ``mark``: what the chat template writes for a file. ``placeholder``: the token that
    stands for one feature; ``token``: its id."""

    mark: str
    placeholder: str
    token: int

    @property
    def beside(self) -> bool:
        """Whether layers of their own attend to files, so that all of a prompt depends on all of them."""
        return False

    @abstractmethod
    def tokens_of(self, file: MediaFile) -> int:
        """Features of a file; none where the model's processor refuses it."""

    @abstractmethod
    def refusal(self, file: MediaFile) -> str:
        """What to answer for a file without features."""

    def grid_of(self, file: MediaFile) -> tuple[int, int] | None:
        """Rows and columns of features, where positions of tokens depend on them (`serve_app.engine.positions`)."""
        return None

    def written(self, file: MediaFile) -> str:
        """What stands in the prompt in the mark's place."""
        return self.placeholder * self.tokens_of(file)


# The rule of a medium; it raises :class:`NoMedia`.
RuleOf = Callable[[Medium], MediaRule]


def expand(text: str, files: Sequence[MediaFile], rule_of: RuleOf) -> str:
    """A rendered prompt with what its marks stand for. Raises `InvalidInput` where they are not as many."""
    for medium, own in _by_medium(files).items():
        rule = rule_of(medium)
        for file in own:
            if not rule.tokens_of(file):
                raise InvalidInput(rule.refusal(file), param="messages")
        pieces = text.split(rule.mark)
        if len(pieces) - 1 != len(own):
            raise InvalidInput(
                f"The model's chat template shows {len(pieces) - 1} of the {len(own)} {NOUNS[medium]}; send them in "
                "messages of the user.",
                param="messages",
            )
        text = "".join(part for pair in zip(pieces, [*map(rule.written, own), ""], strict=True) for part in pair)
    return text


def place(ids: np.ndarray, files: Sequence[MediaFile], rule_of: RuleOf) -> tuple[Placed, ...]:
    """Where the files' placeholders lie among the prompt's tokens, in order."""
    found: list[Placed] = []
    for medium, own in _by_medium(files).items():
        rule = rule_of(medium)
        at, sizes = np.flatnonzero(ids == rule.token), list(map(rule.tokens_of, own))
        if len(at) != sum(sizes):
            raise InvalidInput(
                f"The prompt has {len(at)} placeholders for {NOUNS[medium]} of {sum(sizes)} tokens; send no control "
                f"tokens beside {NOUNS[medium]}.",
                param="messages",
            )
        each = np.split(at, np.cumsum(sizes)[:-1])
        found += [Placed(f, _runs(where), rule.grid_of(f), rule.beside) for f, where in zip(own, each, strict=True)]
    return tuple(sorted(found, key=lambda placed: placed.places))


def count_tokens(files: Sequence[MediaFile], rule_of: RuleOf) -> int:
    """Features of all of them."""
    return sum(rule_of(file.medium).tokens_of(file) for file in files)


def _by_medium(files: Sequence[MediaFile]) -> dict[Medium, list[MediaFile]]:
    found: dict[Medium, list[MediaFile]] = {}
    for file in files:
        found.setdefault(file.medium, []).append(file)
    return found


def _runs(where: np.ndarray) -> Places:
    """Ascending token numbers as (first, count) of those without a gap."""
    parts = np.split(where, np.flatnonzero(np.diff(where) != 1) + 1)
    return tuple((int(part[0]), len(part)) for part in parts if len(part))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of a model's folder; empty where there is none."""
    path = folder / name
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
