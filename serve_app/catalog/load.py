"""Reads the built-in records and the user's, and answers questions about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import yaml
from pydantic import ValidationError

from serve_app.catalog import canary
from serve_app.catalog.errors import CatalogError, from_validation
from serve_app.catalog.operated import Operated, Share
from serve_app.catalog.price_list import PriceList, Prices
from serve_app.catalog.price_list import built_in as built_in_prices
from serve_app.catalog.pricing import Price
from serve_app.catalog.ranks import check_ranks
from serve_app.catalog.records import ModelRecord, Profile, ProfileName, Stage, Weights

BUILT_IN = Path(__file__).resolve().parent / "models"
PROJECT_ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True, frozen=True)
class Entry:
    record: ModelRecord
    source: Path


@dataclass(slots=True)
class Catalog:
    """Model records by id, in the order they were read (built-in files by name, then the user's, then what was added by
    hand). ``operated``: what else was said by hand. ``problems``: by model, why some of that cannot be followed.
    ``canaries``: by model, those that can be followed.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    operated: Mapping[str, Operated] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    canaries: dict[str, Share] = field(default_factory=dict)

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
        return Prices(self.own_prices, listed)

    @property
    def own_prices(self) -> dict[str, Price | None]:
        """By the names under which :class:`Prices` asks for them, without the operator's list."""
        prices = {record.id: record.price for record in self}
        own = ((record, record.adapters) for record in self if record.adapters is not None)
        return prices | {record.adapter_price_id: lora.price for record, lora in own if lora.price is not None}

    def started(self, profile: ProfileName, only: Iterable[str] = ()) -> list[tuple[ModelRecord, Profile]]:
        """What a profile starts: every record that has it, or just those in `only`; with what was started by hand, and
        without what was stopped.

        Raises CatalogError when `only` names a model that is unknown or that the profile cannot start, and
        when a directory of weights is missing. What was said by hand and cannot be followed is left out.
        """
        wanted = list(only)
        for model in wanted:
            if model not in self:
                raise CatalogError("SERVE_APP_MODELS", model, "no such model in the catalogue", _suggest(model, self))
            if profile not in self[model].serving:
                raise self._without(model, profile)
        chosen = [self[model] for model in wanted] or list(self)
        starting = []
        for record in chosen:
            said = self.operated.get(record.id)
            if profile in record.serving and (said is None or (said.running is None and not said.record)):
                starting.append(self.startable(record.id, profile))
        for model, said in self.operated.items():
            if said.running and model in self:
                try:
                    starting.append(self.startable(model, profile))
                except CatalogError as error:
                    self.problems[model] = error.told
        return starting

    def startable(self, model: str, profile: ProfileName) -> tuple[ModelRecord, Profile]:
        """The model's record, and how the profile serves it. Raises CatalogError where it cannot be started; KeyError
        for an unknown model.
        """
        record, source = self[model], self.source(model)
        if profile not in record.serving:
            raise self._without(model, profile)
        check_ranks(record, profile, source)
        weights_directory(record.weights, source)
        if record.draft is not None:
            weights_directory(record.draft.weights, source, "draft.weights.path")
            for name, path in record.draft.lora.items():
                weights_directory(Weights(path=path), source, f"draft.lora.{name}")
        for name, path in (record.adapters.public if record.adapters is not None else {}).items():
            weights_directory(Weights(path=path), source, f"lora.public.{name}")
        chosen, said = record.serving[profile], self.operated.get(model)
        try:
            return record, bounded(chosen, said.bounds if said is not None else {})
        except CatalogError as error:  # the record has changed since
            self.problems[model] = error.told
            return record, chosen

    def _without(self, model: str, profile: ProfileName) -> CatalogError:
        have = ", ".join(self[model].serving) or "none"
        return CatalogError(
            self.source(model),
            f"serving.{profile}",
            f"{model} has no {profile} profile (it has: {have})",
            f"Add serving.{profile} to a copy of this record in SERVE_APP_HOME/models.",
        )


def load_catalog(
    home: Path | None = None, built_in: Path = BUILT_IN, operated: Mapping[str, Operated] = MappingProxyType({})
) -> Catalog:
    """Built-in records, then `home`/models/*.yaml and what was added by hand, either of which may replace an id before
    it. One without a price has the one of Cloudflare's table. Raises CatalogError, but not for what was added by hand.
    """
    entries = _read_folder(built_in)
    if home is not None and (home / "models").is_dir():
        entries |= _read_folder(home / "models")
    return with_operated(entries, home, operated)


def with_operated(files: Mapping[str, Entry], home: Path | None, operated: Mapping[str, Operated]) -> Catalog:
    """The catalogue of what was read from ``files`` and of what was said by hand."""
    catalog = Catalog(dict(files), operated)
    for model, said in operated.items():
        if said.record:
            source = by_hand(home, model)
            try:
                catalog.entries[model] = Entry(read_record(said.record, source), source)
            except CatalogError as error:
                catalog.problems[model] = error.told
    table = built_in_prices()
    for model, entry in catalog.entries.items():
        if entry.record.price is None and model in table:
            priced = entry.record.model_copy(update={"price": table[model]})
            catalog.entries[model] = Entry(priced, entry.source)
    _take_canaries(catalog)
    return catalog


def _take_canaries(catalog: Catalog) -> None:
    """Raises CatalogError for one that stands in a file, and where nothing was said by hand of either model."""
    records, operated = {record.id: record for record in catalog}, catalog.operated
    for model, record in records.items():
        if (found := canary.effective(record, operated)) is None:
            continue
        error = canary.wrong(model, records, operated)
        if error is None:
            catalog.canaries[model] = found
        elif model in operated or found.model in operated:
            catalog.problems[model] = error.told
        else:
            raise CatalogError(catalog.source(model), canary.FIELD, error.reason, error.remedy)


def load_record(path: Path) -> ModelRecord:
    """One record from its file. Whether its weights exist is asked when it is started. Raises
    CatalogError.
    """
    try:
        return _read_once(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise CatalogError(path, "", "the file is not readable as YAML in UTF-8", "Save it as UTF-8 text.") from None


@lru_cache(maxsize=256)
def _read_once(text: str, path: Path) -> ModelRecord:
    """Records do not change; one that has been read is not parsed again while its file says the same."""
    return read_record(text, path)


def read_record(text: str, path: Path) -> ModelRecord:
    """One record from its text, with the checks of a file; ``path``: what errors call it. Raises CatalogError."""
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CatalogError(path, f"line {line}", error.problem or "not YAML", "Correct the YAML.") from None
    except (RecursionError, yaml.YAMLError):
        raise CatalogError(path, "", "the file is not readable as YAML in UTF-8", "Save it as UTF-8 text.") from None
    except (ValueError, LookupError, AttributeError):  # such as the date 2026-02-30, or a number of 5,000 digits
        raise CatalogError(path, "", "a value is not of the type it looks like", "Write it in quotes.") from None
    if not isinstance(data, dict):
        raise CatalogError(path, "", "a record is a mapping of keys to values", "Start it with `id: @cf/...`.")
    if "id" in data and not isinstance(data["id"], str):
        raise CatalogError(path, "id", f"{data['id']!r} is not text", "Write it in quotes, as '@cf/author/name'.")
    try:
        return ModelRecord.model_validate(data)
    except ValidationError as error:
        raise from_validation(path, error, ModelRecord) from None


MOST_NESTED = 20
_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


def read_sent_record(text: str) -> ModelRecord:
    """A record that came over the network. Raises CatalogError."""
    source, depth = Path("record"), 0
    try:
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):
                # A few of them, one in the other, become gigabytes.
                raise CatalogError(source, "", "aliases (*name) are not taken", "Write the values out.")
            depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
            if depth > MOST_NESTED:  # each level costs the parser time for all that are open
                raise CatalogError(
                    source, "", f"it is nested deeper than {MOST_NESTED} levels", "No record needs that."
                )
    except yaml.YAMLError:
        pass  # whose fault is told with its line below
    return read_record(text, source)


def by_hand(home: Path | None, model: str) -> Path:
    """The file that a record which was added by hand would be in: paths in it are seen from there."""
    return (home or Path()) / "models" / f"{model.lstrip('@').replace('/', '--')}.yaml"


def bounded(profile: Profile, bounds: Mapping[str, tuple[int, int]]) -> Profile:
    """The profile with other bounds of replicas, by stage. Raises CatalogError."""
    changed: dict[str, Stage] = {}
    for stage, (least, most) in bounds.items():
        if (known := profile.stages.get(stage)) is None:
            raise CatalogError("replicas", stage, "the model has no such stage", f"It has {', '.join(profile.stages)}.")
        try:
            changed[stage] = Stage.model_validate({**known.model_dump(), "min_replicas": least, "max_replicas": most})
        except ValidationError as error:
            raise from_validation("replicas", error, Stage) from None
    return profile.model_copy(update=changed) if changed else profile


def weights_directory(weights: Weights, source: Path, field: str = "weights.path") -> Path | None:
    """Where a `path` of a record lies: absolute, else beside the record's file, else under the project root.

    None for weights that are not a directory. Raises CatalogError when there is nothing at any of the places.
    """
    if weights.path is None:
        return None
    try:
        given = Path(weights.path).expanduser()
        places = [given] if given.is_absolute() else [source.parent / given, PROJECT_ROOT / given]
        for place in places:
            if place.is_dir():
                return place.resolve()
    except (OSError, RuntimeError, ValueError):
        reason = f"{weights.path[:120]} cannot be looked at"
        raise CatalogError(source, field, reason, "Name a directory that the server's user may read.") from None
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
