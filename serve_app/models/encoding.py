"""What sees and hears in a model, and how much memory that takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve_app.models import crossing, hearing, vision
from serve_app.models.largest import Largest, largest_picture, largest_sound
from serve_app.models.media import BATCH, KEPT_BYTES, LARGE, PREPARED, RESIZED_BYTES, Encoded, MediaEncoder, held_bytes
from serve_app.models.peak import peak_bytes

# What says how a medium is prepared: a part of the first file, or all of the second.
PARTS = {"image": "image_processor", "audio": "feature_extractor"}


# What a process on a CPU grows by, since operators take memory for themselves: at most 1.4 times the tensors' bytes and
# 64 MiB. Measured in bfloat16, MiB of tensors and of the process: 52 and 93, 92 and 174, 180 and 206, 278 and 410, 352
# and 453.
CPU_SHARE, CPU_BYTES = 1.4, 64 << 20
# Of processors, by medium.
Settings = dict[str, dict[str, Any]]
# By `model_type`: the families whose pictures or sounds are served.
FAMILIES = vision.KNOWN | crossing.KNOWN | hearing.MERGED.keys()


@dataclass(slots=True, frozen=True)
class Encoding:
    """Of one medium. ``peak``: bytes while the largest batch is encoded, with what is given and found; it has ``count``
    files. Of the largest file: ``prepared``, bytes before it is encoded, ``features``, bytes of what it becomes, and
    its ``places``. ``context``: tokens of the longest. ``beside``: whether features lie where the model is
    (:mod:`serve_app.models.crossing`); others lie in the host's memory. ``sees``: pictures.
    """

    peak: int
    count: int
    prepared: int
    features: int
    places: int
    context: int
    beside: bool
    sees: bool

    @property
    def waiting(self) -> int:
        """Bytes of files that are prepared while others are encoded."""
        return PREPARED * self.prepared * min(self.places, LARGE) // self.places

    @property
    def held(self) -> int:
        """Bytes of features that requests hold, at most."""
        return held_bytes(self.features // self.places, self.context, beside=self.beside)

    def on_device(self, *, cpu: bool) -> dict[str, int]:
        """Bytes where the model is, by what for."""
        found = {"encoding": self.peak}
        if cpu:
            found["encoding"] = int(self.peak * CPU_SHARE) + CPU_BYTES
            found["prepared files"] = self.waiting + (RESIZED_BYTES if self.sees else 0)
        if cpu or self.beside:
            found["features"] = KEPT_BYTES + self.held
        return found


def media_encoders(module: Any) -> dict[str, MediaEncoder]:
    """By medium, of a model that is loaded or has no weights."""
    seen: MediaEncoder | None = vision.picture_encoder(module) or crossing.crossed_encoder(module)
    found: dict[str, MediaEncoder | None] = {"image": seen, "audio": hearing.sound_encoder(module)}
    return {medium: encoder for medium, encoder in found.items() if encoder is not None}


def bare_module(name: str, config: Any, dtype: torch.dtype) -> Any:
    """A model without weights: ``name`` of its class in transformers, which objects in any way it likes."""
    import transformers
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        module = getattr(transformers, name)._from_config(config, dtype=dtype)
    return module.eval()


def read_settings(folder: Path) -> Settings:
    """What the processors of a model's folder are set to, by medium."""
    whole, own = _read(folder / "processor_config.json"), _read(folder / "preprocessor_config.json")
    return {medium: {**(whole.get(part) or own), **_longest(whole)} for medium, part in PARTS.items()}


def encodings(module: Any, settings: Settings, places: int, budget: int = BATCH) -> dict[str, Encoding]:
    """Of a ``module`` without weights (:func:`bare_module`), by medium; ``places``: tokens of the longest context,
    ``budget``: of a batch.
    """
    found = {}
    for medium, encoder in media_encoders(module).items():
        largest = {"image": largest_picture, "audio": largest_sound}[medium](
            module.config, settings.get(medium) or {}, places
        )
        found[medium] = _measure(module, encoder, largest, largest.batch(budget), places, medium == "image")
    return found


def device_bytes(folder: Path, module: Any, places: int) -> int:
    """On a GPU beside weights and steps, of the model in ``folder``, which is loaded as ``module``; ``places``: see
    :func:`encodings`.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    found = encodings(bare_module(type(module).__name__, config, module.dtype), read_settings(folder), places)
    return sum(size for need in found.values() for size in need.on_device(cpu=False).values())


def _measure(module: Any, encoder: MediaEncoder, largest: Largest, count: int, context: int, sees: bool) -> Encoding:
    batch = [{name: tensor.clone() for name, tensor in largest.prepared.items()} for _ in range(count)]
    one: list[Encoded] = []

    def encode() -> Sequence[Encoded]:
        # As it is written, outside of inference mode: in there composite operators are not taken apart.
        found: list[Encoded] = type(encoder).__call__.__wrapped__(encoder, batch)  # type: ignore[attr-defined]
        one.append(found[0])
        return found

    given = [tensor for file in batch for tensor in file.values()]
    peak = peak_bytes(encode, given, [*module.parameters(), *module.buffers()])
    features = one[0].features
    bytes_ = features.numel() * features.element_size()
    return Encoding(peak, count, largest.bytes, bytes_, len(features), context, encoder.beside, sees)


def _longest(whole: dict[str, Any]) -> dict[str, Any]:
    return {name: whole[name] for name in ("max_audio_len",) if name in whole}


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
