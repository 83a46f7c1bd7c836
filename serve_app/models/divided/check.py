"""Before a divided model is served: its ranks' own pass beside transformers' plain one, scaled down.

As :mod:`serve_app.models.loading.check`, and through the same files, reader and collectives as the model itself: the
small model is written as a checkpoint, and each rank reads its part of it.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from serve_app.models.divided.load import load_part
from serve_app.models.divided.sharing import Shares
from serve_app.models.latent import has_latents
from serve_app.models.loading.check import (
    ALLOWED,
    ALLOWED_STEPWISE,
    SIZES,
    Truth,
    Verdict,
    build_small,
    first_difference,
    fused_difference,
    recall,
    remember,
)
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.miniature import NotScalable, Sizes
from serve_app.models.loading.observe import Unservable
from serve_app.models.loading.prepare import prepare
from serve_app.parallel.group import Group
from serve_app.parallel.steps import SharedForward

log = logging.getLogger(__name__)
# Rows of the small model's steps from which on they travel, where the model's own do: so that both ways are compared.
_LEAST = 4


def check_divided(model_class: Any, config: Any, group: Group, *, travels: bool = False) -> Verdict:
    """Every rank calls it and gets the same verdict. ``travels``: whether rows of large steps go to their experts.
    Never raises for what a model does.
    """
    started = time.perf_counter()
    division = group.place.division + ("d" if travels else "") + ("c" if group.place.copies else "")
    known = recall(model_class, config, division)
    if group.agree(known is not None) and known is not None:
        known.cached, known.seconds = True, round(time.perf_counter() - started, 3)
        return known
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on several
    try:
        verdict = _compare(model_class, config, group, _LEAST if travels else 0)
    finally:
        torch.set_num_threads(threads)
    verdict.seconds = round(time.perf_counter() - started, 2)
    if verdict.compared:
        remember(model_class, config, verdict, division)
    return verdict


def check_part(model_class: Any, config: Any, group: Group, shares: Shares) -> Verdict:
    """As :func:`check_divided`, of a part with ``shares``. Where rows that travel give something else and the record
    does not ask for it, none do.
    """
    verdict = check_divided(model_class, config, group, travels=shares.least > 0)
    if verdict.differs and shares.least and group.place.dispatch == "auto":
        log.warning("rows do not travel to experts: %s", verdict.differs)
        shares.least = 0
        return check_divided(model_class, config, group)
    return verdict


def sizes_for(tensor: int, pipeline: int, kv_heads: int | None = None) -> Sizes:
    """Sizes that so many ranks can divide. ``kv_heads``: of the model itself, which lie on one rank each or on several
    in the small copy as well.
    """
    several = kv_heads is not None and kv_heads % tensor != 0
    small = kv_heads if several and kv_heads is not None else max(SIZES.kv_heads, tensor)
    return Sizes(
        layers=max(SIZES.layers, 2 * pipeline), heads=max(SIZES.heads, tensor, 2 * small), kv_heads=small,
        experts=max(SIZES.experts, tensor), inner=SIZES.inner * -(-tensor // 8), window=SIZES.window,
        chunk=SIZES.chunk, original=SIZES.original, context=SIZES.context,
    )  # fmt: skip


def fewest_kv_heads(text: Any) -> int | None:
    """Of any layer; None where the configuration does not say."""
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    found = [heads for layer in layers if (heads := getattr(layer, "num_key_value_heads", None))]
    return min(found, default=None)


def _compare(model_class: Any, config: Any, group: Group, least: int) -> Verdict:
    """A model with latents is compared in both forms, as in one process."""
    sizes = sizes_for(group.place.tensor, group.place.pipeline, fewest_kv_heads(config.get_text_config()))
    try:
        plain = build_small(model_class, config, sizes, "eager", 0)
    except Exception as error:  # classes of models may object in any way they like
        reason = error if isinstance(error, NotScalable) else f"{type(error).__name__}: {error}"
        said = f"it can't be compared with transformers, as it can't be scaled down: {reason}"
        return Verdict(differs=said[:300], compared=False, latents=False)
    heads = _compare_with(plain, model_class, group, sizes, least, latents=False)
    if not has_latents(plain):
        return heads
    found = _compare_with(plain, model_class, group, sizes, least, latents=True)
    return heads if heads.differs or found.differs else found


def _compare_with(plain: Any, model_class: Any, group: Group, sizes: Sizes, least: int, *, latents: bool) -> Verdict:
    with torch.inference_mode():
        try:
            with tempfile.TemporaryDirectory() as folder:
                _write(plain, Path(folder), group)
                part = load_part(model_class, Path(folder), dtype=torch.float32, group=group, least=least)
            # What is read in part comes to the ranks' device.
            prepared = prepare(part.module.to("cpu"), torch.device("cpu"), latents=latents)
        except (Unservable, UnsupportedModel) as reason:
            return Verdict(differs=str(reason), latents=latents)
        prepared.vocab_size = part.division.vocab
        forward = SharedForward(prepared.forward, group, part.division.widths)
        shape = prepared.kv_shape(torch.float32)
        # Ranks of stages without such layers do as the others.
        prepared.keeps = not group.agree(not prepared.keeps)
        stepwise = not group.agree(not prepared.stepwise)
        truth = Truth(plain, ALLOWED_STEPWISE if stepwise else ALLOWED)
        differs = first_difference(forward, prepared, shape, truth, sizes)
        if differs:
            said = f"divided among {group.place.ranks} ranks {differs}"
            return Verdict(differs=said, fused_differs=said, latents=latents)
        if group.place.pipeline > 1:
            return Verdict(fused_differs="layers of other stages are on other ranks", latents=latents)
        shared, plug = part.sharing(group), part.summing(group)
        fused = fused_difference(part.module, prepared, shape, truth, sizes, shared=shared, plug=plug)
    # A rank's own trouble is everybody's.
    agreed = group.agree(not fused)
    return Verdict(fused_differs="" if agreed else fused or "another rank can't use it", latents=latents)


def _write(plain: Any, folder: Path, group: Group) -> None:
    """The small model's files; transformers writes them on rank 0 alone, as a checkpoint of its family has them."""
    if not group.place.rank:
        plain.save_pretrained(folder)
    files = sorted(folder.iterdir())
    names = group.told(json.dumps([file.name for file in files]).encode())
    for index, name in enumerate(json.loads(names)):
        data = group.told(files[index].read_bytes() if files else b"")
        if group.place.rank:
            (folder / Path(name).name).write_bytes(data)
