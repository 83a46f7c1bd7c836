"""A folder with a pipeline of diffusers, as what draws, changes pictures and fills in masks."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from serve_app.predict.predictor import Place

INDEX = "model_index.json"
REMEDY = (
    'This model needs diffusers, which is not installed where its worker runs: `pip install "serve-app[images]"` '
    "there, and start the server again."
)
Mode = Literal["draw", "change", "fill"]
MODES: tuple[Mode, ...] = ("draw", "change", "fill")
# Classes of diffusers that draw, change a picture, and fill in a mask, by family. Others may load what lies elsewhere.
FAMILIES = (
    ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
    ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    ("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
    ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline", ""),
)
# Where classes of a pipeline's parts may come from, which are installed here and never files of the folder; and how
# such classes are called: models, and what reads tables. Others of those libraries may read pickles.
LIBRARIES = ("diffusers", "transformers", "stable_diffusion")
PART = re.compile(
    r"[A-Za-z0-9]+(Model|ModelWithProjection|Tokenizer|TokenizerFast|Scheduler|ImageProcessor|FeatureExtractor"
    r"|SafetyChecker)|TokenizersBackend|Autoencoder(KL|Tiny)"
)


class UnsupportedPipeline(ValueError):
    """A folder that cannot be loaded; the text says why."""


@dataclass(slots=True, frozen=True)
class Ways:
    """``by_mode``: what the model can do; ``grid``: pixels of which both sides are multiples."""

    by_mode: dict[Mode, Any]
    grid: int

    def takes(self, mode: Mode) -> frozenset[str]:
        """The names of what a call of that pipeline takes."""
        return frozenset(inspect.signature(self.by_mode[mode].__call__).parameters)


def installed() -> bool:
    return find_spec("diffusers") is not None


def load_ways(place: Place) -> Ways:
    """Raises :class:`UnsupportedPipeline`. Nothing is fetched, and only safetensors are read."""
    import diffusers

    family, named = read_index(place.path)
    dtype = torch.float32 if place.dtype == "auto" else getattr(torch, place.dtype)
    base = getattr(diffusers, named).from_pretrained(
        str(place.path),
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        variant=_variant(place.path),
    )
    base.to(place.device)
    base.set_progress_bar_config(disable=True)
    # One picture of a batch after the other, so that memory is that of one.
    if hasattr(base.vae, "enable_slicing"):
        base.vae.enable_slicing()
    by_mode: dict[Mode, Any] = {}
    for mode, name in zip(MODES, family, strict=True):
        if name == named:
            by_mode[mode] = base
        elif name and not _fills_only(base):
            by_mode[mode] = _sharing(base, getattr(diffusers, name))
    scale = int(base.vae_scale_factor)
    # Two by two latents are one token of such models.
    packed = "Flux" in named or "3" in named
    return Ways(by_mode, scale * (2 if packed else 1))


def read_index(folder: Path) -> tuple[tuple[str, str, str], str]:
    """The family and the class that the folder names, checked before anything of it is loaded."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        named = index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UnsupportedPipeline(f"{folder} has no {INDEX} that can be read; give a pipeline of diffusers") from None
    family = next((one for one in FAMILIES if isinstance(named, str) and named and named in one), None)
    if family is None:
        known = ", ".join(one[0] for one in FAMILIES)
        raise UnsupportedPipeline(f"{INDEX} names {str(named)[:80]!r}, which is not drawn with here; known are {known}")
    for part, value in index.items():
        if part.startswith("_") or not isinstance(value, list):
            continue
        if not any(value):
            continue
        library, kind = (*value, None)[:2]
        if library not in LIBRARIES or not isinstance(kind, str) or not PART.fullmatch(kind):
            said = f"{INDEX} takes {part} from {str(value)[:120]}"
            raise UnsupportedPipeline(f"{said}; only models, tokenizers and schedulers of known libraries are read")
    if code := sorted(path.name for path in folder.rglob("*.py")):
        raise UnsupportedPipeline(f"{folder} holds code ({code[0]}), which is not run; remove it")
    return family, named


def _variant(folder: Path) -> str | None:
    """The kind of rounded copies, where a part has nothing else."""
    for part in sorted({path.parent for path in folder.glob("*/*.safetensors")}):
        names = [path.name for path in part.glob("*.safetensors")]
        for kind in ("fp16", "bf16"):
            if all(f".{kind}." in name or f".{kind}-" in name for name in names):
                return kind
    return None


def _fills_only(pipeline: Any) -> bool:
    """Whether the model reads a mask beside each latent, without which it draws nothing."""
    unet = pipeline.components.get("unet")
    return unet is not None and unet.config.in_channels != pipeline.vae.config.latent_channels


def _sharing(pipeline: Any, other: Any) -> Any:
    """A pipeline of the class ``other`` of the same parts, and with what the folder says of the pipeline itself.
    Not by ``from_pipe``, which would cast parts that are kept in float32.
    """
    known = inspect.signature(other.__init__).parameters
    given = {name: value for name, value in {**pipeline.config, **pipeline.components}.items() if name in known}
    made = other(**given)
    made.set_progress_bar_config(disable=True)
    return made
