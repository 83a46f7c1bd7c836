"""Before a divided model is served: its ranks' own pass beside transformers' plain one, scaled down.

As :mod:`serve_app.models.loading.check`, and through the same files, reader and collectives as the model itself: the
small model is written as a checkpoint, and each rank reads its part of it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from serve_app.models.divided.load import load_part
from serve_app.models.loading.check import SIZES, Truth, Verdict, build_small, first_difference, recall, remember
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.miniature import NotScalable, Sizes
from serve_app.models.loading.observe import Unservable
from serve_app.models.loading.prepare import prepare
from serve_app.parallel.group import Group
from serve_app.parallel.steps import SharedForward


def check_divided(model_class: Any, config: Any, group: Group) -> Verdict:
    """Every rank calls it and gets the same verdict. Never raises for what a model does."""
    started = time.perf_counter()
    place = group.place
    division = f"{place.tensor}x{place.pipeline}"
    known = recall(model_class, config, division)
    if not group.most(float(known is None)) and known is not None:
        known.cached, known.seconds = True, round(time.perf_counter() - started, 3)
        return known
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on several
    try:
        verdict = _compare(model_class, config, group)
    finally:
        torch.set_num_threads(threads)
    verdict.seconds = round(time.perf_counter() - started, 2)
    if verdict.compared:
        remember(model_class, config, verdict, division)
    return verdict


def sizes_for(tensor: int, pipeline: int) -> Sizes:
    """Sizes that so many ranks can divide."""
    return Sizes(
        layers=max(SIZES.layers, 2 * pipeline), heads=max(SIZES.heads, tensor), inner=SIZES.inner * -(-tensor // 8),
        window=SIZES.window, chunk=SIZES.chunk, original=SIZES.original, context=SIZES.context,
    )  # fmt: skip


def _compare(model_class: Any, config: Any, group: Group) -> Verdict:
    sizes = sizes_for(group.place.tensor, group.place.pipeline)
    try:
        plain = build_small(model_class, config, sizes, "eager", 0)
    except Exception as error:  # classes of models may object in any way they like
        reason = error if isinstance(error, NotScalable) else f"{type(error).__name__}: {error}"
        said = f"it can't be compared with transformers, as it can't be scaled down: {reason}"
        return Verdict(differs=said[:300], compared=False, latents=False)
    with torch.inference_mode():
        try:
            with tempfile.TemporaryDirectory() as folder:
                _write(plain, Path(folder), group)
                part = load_part(model_class, Path(folder), dtype=torch.float32, group=group)
            prepared = prepare(part.module, torch.device("cpu"), latents=False)
        except (Unservable, UnsupportedModel) as reason:
            return Verdict(differs=str(reason), latents=False)
        prepared.vocab_size = part.division.vocab
        forward = SharedForward(prepared.forward, group, part.division.widths)
        shape = prepared.kv_shape(torch.float32)
        differs = first_difference(forward, prepared, shape, Truth(plain), sizes)
    said = differs and f"divided among {group.place.ranks} ranks {differs}"
    elsewhere = "layers of other stages are on other ranks" if group.place.pipeline > 1 else ""
    return Verdict(differs=said, fused_differs=said or elsewhere, latents=False)


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
