"""Reads the built-in records and the user's, and answers questions about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError

from serve_app.catalog.errors import CatalogError, from_validation
from serve_app.catalog.price_list import PriceList, Prices
from serve_app.catalog.price_list import built_in as built_in_prices
from serve_app.catalog.records import ModelRecord, Profile, ProfileName, Weights

BUILT_IN = Path(__file__).resolve().parent / "models"
PROJECT_ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True, frozen=True)
class Entry:
    record: ModelRecord
    source: Path


@dataclass(slots=True)
class Catalog:
    """Model records by id, in the order they were read (built-in files by name, then the user's)."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def __contains__(self, model: object) -> bool:
        return model in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ModelRecord]:
        return (entry.record for entry in self.entries.values())

    def __getitem__(self, model: str) -> ModelRecord:
        """The record of a model id; KeyError for an unknown one."""
        return self.entries[model].record

    def get(self, model: str) -> ModelRecord | None:
        entry = self.entries.get(model)
        return entry.record if entry else None

    def source(self, model: str) -> Path:
        """The file a record came from."""
        return self.entries[model].source

    def prices(self, listed: PriceList | None = None) -> Prices:
        """What the models cost: by their records, by Cloudflare's table, and before both by the operator's list."""
        prices = {record.id: record.price for record in self}
        own = ((record, record.adapters) for record in self if record.adapters is not None)
        prices |= {record.adapter_price_id: lora.price for record, lora in own if lora.price is not None}
        return Prices(prices, listed)

    def started(self, profile: ProfileName, only: Iterable[str] = ()) -> list[tuple[ModelRecord, Profile]]:
        """What a profile starts: every record that has it, or just those in `only`.

        Raises CatalogError when `only` names a model that is unknown or that the profile cannot start, and
        when a directory of weights is missing.
        """
        wanted = list(only)
        for model in wanted:
            if model not in self:
                raise CatalogError("SERVE_APP_MODELS", model, "no such model in the catalogue", _suggest(model, self))
            if profile not in self[model].serving:
                have = ", ".join(self[model].serving) or "none"
                raise CatalogError(
                    self.source(model),
                    f"serving.{profile}",
                    f"{model} has no {profile} profile (it has: {have})",
                    f"Add serving.{profile} to a copy of this record in SERVE_APP_HOME/models.",
                )
        chosen = [self[model] for model in wanted] or list(self)
        starting = [(record, record.serving[profile]) for record in chosen if profile in record.serving]
        for record, chosen_profile in starting:
            if chosen_profile.ranks > 1:
                raise CatalogError(
                    self.source(record.id),
                    f"serving.{profile}",
                    f"a worker of {record.id} takes {chosen_profile.ranks} ranks, and workers have one",
                    "Leave tensor_parallel and pipeline_parallel out, or leave the model out of SERVE_APP_MODELS.",
                )
            weights_directory(record.weights, self.source(record.id))
            if record.draft is not None:
                weights_directory(record.draft.weights, self.source(record.id), "draft.weights.path")
            for name, path in (record.adapters.public if record.adapters is not None else {}).items():
                weights_directory(Weights(path=path), self.source(record.id), f"lora.public.{name}")
        return starting


def load_catalog(home: Path | None = None, built_in: Path = BUILT_IN) -> Catalog:
    """Built-in records, then `home`/models/*.yaml, which may replace a built-in id. One without a price has the one of
    Cloudflare's table. Raises CatalogError.
    """
    catalog = Catalog(_read_folder(built_in))
    if home is not None and (home / "models").is_dir():
        catalog.entries |= _read_folder(home / "models")
    table = built_in_prices()
    for model, entry in catalog.entries.items():
        if entry.record.price is None and model in table:
            priced = entry.record.model_copy(update={"price": table[model]})
            catalog.entries[model] = Entry(priced, entry.source)
    return catalog


def load_record(path: Path) -> ModelRecord:
    """One record from its file. Whether its weights exist is asked when it is started. Raises
    CatalogError.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CatalogError(path, f"line {line}", error.problem or "not YAML", "Correct the YAML.") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise CatalogError(path, "", "the file is not readable as YAML in UTF-8", "Save it as UTF-8 text.") from None
    if not isinstance(data, dict):
        raise CatalogError(path, "", "a record is a mapping of keys to values", "Start it with `id: @cf/...`.")
    if "id" in data and not isinstance(data["id"], str):
        raise CatalogError(path, "id", f"{data['id']!r} is not text", "Write it in quotes, as '@cf/author/name'.")
    try:
        return ModelRecord.model_validate(data)
    except ValidationError as error:
        raise from_validation(path, error, ModelRecord) from None


def weights_directory(weights: Weights, source: Path, field: str = "weights.path") -> Path | None:
    """Where a `path` of a record lies: absolute, else beside the record's file, else under the project root.

    None for weights that are not a directory. Raises CatalogError when there is nothing at any of the places.
    """
    if weights.path is None:
        return None
    given = Path(weights.path).expanduser()
    places = [given] if given.is_absolute() else [source.parent / given, PROJECT_ROOT / given]
    for place in places:
        if place.is_dir():
            return place.resolve()
    looked = " nor ".join(str(place) for place in places)
    raise CatalogError(source, field, f"there is no directory {looked}", "Correct the path or create it.")


def _read_folder(folder: Path) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        record = load_record(path)
        if record.id in found:
            raise CatalogError(
                path,
                "id",
                f"{record.id} is already defined in {found[record.id].source}",
                "Give one of them another id.",
            )
        found[record.id] = Entry(record, path)
    return found


def _suggest(model: str, catalog: Catalog) -> str:
    near = [known for known in catalog.entries if known.rsplit("/", 1)[-1] == model.rsplit("/", 1)[-1]]
    if near:
        return f"Did you mean {near[0]}?"
    return "`serve-app models` lists the catalogue."


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's own loader keeps the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)
