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
from serve_app.models.loading.stored import keeps_codes, keeps_latents
from serve_app.planning.cache import has_indexers, has_latents, layer_caches
from serve_app.planning.described import Cuts, Described, cuts_of, encoded, full_config, states
from serve_app.planning.formats import read_format
from serve_app.planning.held import Held, as_held
from serve_app.planning.model import Model, build
from serve_app.planning.ranks import WHOLE
from serve_app.planning.rounded import NotRounded, as_rounded
from serve_app.planning.tensors import NoTensors, Tensor, from_headers, read_headers
from serve_app.planning.wanted import Wanted, wanted_of

PUBLISHED = Path(__file__).parent / "published"
# What the files in PUBLISHED say of themselves beside what config.json has.
_ABOUT = ("_source",)


def find_model(
    name: str, home: Path, *, held: Held | None = None, adapters: bool | None = None, quantization: str | None = None,
    kv_cache_dtype: str | None = None,
) -> tuple[Model, ModelRecord | None]:  # fmt: skip
    """The model called ``name``, and its record if it has one. ``held``: how a worker on a CPU has the weights; None:
    it has a GPU. What else workers are asked for is the record's where it is None. Raises :class:`NoTensors`,
    :class:`~serve_app.planning.rounded.NotRounded` and CatalogError.
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
    wanted = wanted_of(record, adapters=adapters, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    item = 4 if held is not None and held.dtype == "float32" else 2
    if wanted.kv_cache_dtype == "fp8":
        item = 1
    model = plan_model(name, config, tensors, item=item, held=held, folder=folder, wanted=wanted)
    return model, record


def plan_model(
    name: str, config: dict[str, Any], tensors: list[Tensor], *, item: float, held: Held | None = None,
    folder: Path | None = None, wanted: Wanted | None = None,
) -> Model:  # fmt: skip
    """``tensors`` []: as ``config`` describes them. ``item``: bytes of a number in the cache. ``folder``: with the
    settings of the processors; None for those of the model's authors. ``wanted``: of workers, whose cache ``item`` is
    for; a worker on a CPU rounds as ``wanted`` says."""
    wanted = wanted or Wanted(quantization=held.quantization if held is not None else "none")
    adapters, quantization = wanted.adapters, wanted.quantization
    full = full_config(config)
    try:
        stored_as = read_format(packing_of(config), config.get("expert_dtype"))
    except ValueError as error:
        if not tensors:
            raise NoTensors(str(error)) from error
        stored_as = None  # the headers say what weights take
    described = Described(config, full, held.dtype if held is not None else "bfloat16")
    tensors, left = described.read(tensors)
    if has_indexers(full):
        tensors = described.loaded_as(tensors)
    if not tensors or (held is not None and described.builds):
        tensors = described.tensors(stored_as)
    needs = states(described)
    # What ranks of such models divide, their own modules say.
    asks = needs is not None or has_indexers(full)
    cuts = cuts_of(described) if asks else Cuts()
    latents = keeps_latents(adapters=adapters, quantization=quantization)
    caches = layer_caches(full, item, latent=latents, states=needs.states if needs is not None else None)
    plain = needs is None and not has_latents(full)
    if held is not None:
        if quantization == "fp8":
            raise NotRounded("quantization fp8 is for GPUs; plan it for one, or take int8 or int4 on a CPU")
        tensors = as_held(
            tensors, replace(held, quantization=quantization), routers=plain, latents=latents and has_latents(full)
        )
    elif quantization != "none":
        tensors, stored_as = as_rounded(tensors, quantization, stored_as, fused=plain), None
    elif stored_as is not None and not keeps_codes(adapters=adapters, quantization=quantization):
        stored_as = replace(stored_as, group=stored_as.group and 0)
    if asks:
        tensors = [replace(each, whole=_lies_whole(each, cuts)) for each in tensors]
        alone = {t.layer for t in tensors if t.makes_keys and (t.whole or t.below in cuts.joined)}
        caches = [cache.on_every_rank() if index in alone else cache for index, cache in enumerate(caches)]
    model = build(name, full, tensors, caches)
    model.dropped += left
    model.undivided = cuts.reason
    if needs is not None:
        model.recurrence = needs.fixed, needs.each
    if held is not None and held.dtype == "float32":
        model.item = 4
    model.stored_as, model.wanted = stored_as if held is None else None, wanted
    model.media = encoded(described, folder)
    return model


def _lies_whole(tensor: Tensor, cuts: Cuts) -> bool:
    """Whether ranks that divide layers have all of it. Files call some tensors otherwise than memory does, experts for
    one; these are taken to be divided.
    """
    if tensor.layer is None or tensor.role in (*WHOLE, "experts"):
        return False
    return tensor.below in cuts.whole or (tensor.role, tensor.layer) in cuts.roles


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
