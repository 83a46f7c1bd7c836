"""Where a plan's model comes from: a folder, a record of the catalogue, or a published configuration that ships."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import load_catalog
from serve_app.catalog.records import ModelRecord
from serve_app.models.loading.folder import packing_of
from serve_app.planning.cache import layer_caches
from serve_app.planning.described import Cuts, cuts_of, describe, encoded, full_config, states
from serve_app.planning.formats import read_format
from serve_app.planning.held import Held, as_held
from serve_app.planning.model import Model, build
from serve_app.planning.ranks import WHOLE
from serve_app.planning.tensors import NoTensors, Tensor, from_headers, read_headers

PUBLISHED = Path(__file__).parent / "published"
# What the files in PUBLISHED say of themselves beside what config.json has.
_ABOUT = ("_source",)


def find_model(name: str, home: Path, *, item: float = 2, held: Held | None = None) -> tuple[Model, ModelRecord | None]:
    """The model called ``name``, and its record if it has one. ``item``: bytes of a number in the cache. ``held``: how
    a worker on a CPU has the weights; None: as they are stored. Raises :class:`NoTensors` and CatalogError.
    """
    record, folder = None, None
    if name in published():
        config, tensors = published()[name], list[Tensor]()
    elif Path(name).is_dir():
        folder = Path(name)
        config, tensors = _folder(folder)
    else:
        catalog = load_catalog(home)
        if name not in catalog:
            raise NoTensors(
                f"{name} is no folder, no record of the catalogue, and none of the configurations that ship "
                f"({', '.join(sorted(published()))})"
            )
        record = catalog[name]
        folder, config, tensors = _recorded(record, home, catalog.source(name))
    model = plan_model(name, config, tensors, item=item, held=held, folder=folder)
    if model.stored_as is not None and record is not None and (record.adapters or record.quantization != "none"):
        # What adapters are for, and what is rounded, are numbers.
        model.stored_as = replace(model.stored_as, group=model.stored_as.group and 0)
    return model, record


def plan_model(
    name: str, config: dict[str, Any], tensors: list[Tensor], *, item: float, held: Held | None = None,
    folder: Path | None = None,
) -> Model:  # fmt: skip
    """``tensors`` []: as ``config`` describes them. ``item``: bytes of a number in the cache. ``folder``: with the
    settings of the processors; None for those of the model's authors."""
    full = full_config(config)
    try:
        stored_as = read_format(packing_of(config))
    except ValueError as error:
        if not tensors:
            raise NoTensors(str(error)) from error
        stored_as = None  # the headers say what weights take
    tensors = tensors or describe(config, full, stored_as)
    dtype = held.dtype if held is not None else "bfloat16"
    needs = states(config, full, dtype)
    cuts = cuts_of(config, full, dtype) if needs is not None else Cuts()
    # With linears that are rounded every head's keys and values lie in the cache.
    latent = held is None or held.quantization == "none"
    if held is not None:
        tensors = as_held(tensors, held, routers=needs is None)
    caches = layer_caches(full, item, latent=latent, states=needs.states if needs is not None else None)
    if needs is not None:
        tensors = [replace(each, whole=_lies_whole(each, cuts)) for each in tensors]
        alone = {t.layer for t in tensors if t.makes_keys and (t.whole or t.below in cuts.joined)}
        caches = [cache.on_every_rank() if index in alone else cache for index, cache in enumerate(caches)]
    model = build(name, full, tensors, caches)
    if needs is not None:
        model.recurrence, model.undivided = (needs.fixed, needs.each), cuts.reason
    if held is not None and held.dtype == "float32":
        model.item = 4
    model.stored_as = stored_as if held is None else None
    model.media = encoded(config, full, folder, dtype)
    return model


def _lies_whole(tensor: Tensor, cuts: Cuts) -> bool:
    """Whether ranks that divide layers have all of it. Files call some tensors otherwise than memory does, experts for
    one; these are taken to be divided.
    """
    if tensor.layer is None or tensor.role in (*WHOLE, "experts"):
        return False
    return tensor.below in cuts.whole or (tensor.role == "attention" and tensor.layer in cuts.layers)


def published() -> dict[str, dict[str, Any]]:
    """Configurations as their authors publish them, by name."""
    found = {}
    for file in sorted(PUBLISHED.glob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        found[file.stem] = {key: value for key, value in values.items() if key not in _ABOUT}
    return found


def _folder(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    file = path / "config.json"
    if not file.is_file():
        raise NoTensors(f"{path} has no config.json; give a directory in Hugging Face format")
    config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise NoTensors(f"{file} names no model_type")
    return config, read_headers(path)


def _recorded(record: ModelRecord, home: Path, source: Path) -> tuple[Path, dict[str, Any], list[Tensor]]:
    """Of a repository only the configuration and the headers are fetched."""
    from serve_app.catalog.weights import tokenizer_directory

    folder = tokenizer_directory(record.weights, home, source)
    config, tensors = _folder(folder)
    if not tensors and record.weights.repo is not None:
        tensors = _headers_of_repository(record.weights.repo, record.weights.revision, source)
    return folder, config, tensors


def _headers_of_repository(repo: str, revision: str | None, source: Path) -> list[Tensor]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = HfApi().get_safetensors_metadata(repo, revision=revision)
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        raise CatalogError(source, "weights.repo", str(error), "Correct it, or try again later.") from None
    headers = []
    for file in found.files_metadata.values():
        headers.append({name: {"dtype": t.dtype, "shape": t.shape} for name, t in file.tensors.items()})
    return from_headers(headers)
