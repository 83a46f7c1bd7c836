"""Adapters that clients upload: a configuration and a file of weights, either of them changed or damaged."""

from __future__ import annotations

import contextlib
import io
import json
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.fuzz.bodies import changed
from benchmarks.fuzz.stored import damaged
from serve_app.adapters.check import PREFIX, check_weights
from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.adapters.shapes import Base

SIZES = {f"model.layers.{i}.self_attn.{name}": (6, 4) for i in range(2) for name in ("q_proj", "v_proj")}
BASE = Base(SIZES | {"lm_head": (8, 4)}, {"model.norm": "LlamaRMSNorm", "model.embed_tokens": "Embedding"}, "llama")
RANK = 2
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": False,
    "exclude_modules": None, "layers_to_transform": [0, 1], "layers_pattern": "layers", "bias": "none",
    "rank_pattern": {"q_proj": RANK}, "alpha_pattern": {"q_proj": 4}, "base_model_name_or_path": "a/b",
}  # fmt: skip


def _header() -> dict[str, Any]:
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (out, into) in SIZES.items():
        for part, shape in (("A", [RANK, into]), ("B", [out, RANK])):
            end = at + 4 * math.prod(shape)
            found[f"{PREFIX}{name}.lora_{part}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
            at = end
    return found


HEADER = _header()
DATA = np.full(sum(RANK * sum(size) for size in SIZES.values()), 0.5, np.float32).tobytes()
TEXT = json.dumps(CONFIG).encode()


def packed(header: bytes, data: bytes = DATA) -> bytes:
    """As safetensors writes it."""
    return len(header).to_bytes(8, "little") + header + data


RIGHT = packed(json.dumps(HEADER).encode())
CONFIGS = changed(CONFIG) | damaged(TEXT)
FILES = st.one_of(changed(HEADER).map(packed), damaged(RIGHT), st.just(RIGHT))


def read_files(config: bytes, weights: bytes) -> None:
    """Refused with a reason when they are uploaded, or read by a worker to finite numbers."""
    try:
        check_weights(read_config(config), io.BytesIO(weights), BASE)
    except AdapterRefused as error:
        assert str(error).encode()  # as the answer does
        with contextlib.suppress(AdapterRefused):
            _loaded(config, weights)
        return
    assert all(np.isfinite(numbers).all() for numbers in _loaded(config, weights))


def _loaded(config: bytes, weights: bytes) -> list[Any]:
    from serve_app.adapters.weights import read_adapter  # with torch, which nothing else here needs

    deltas = read_adapter(config, weights).deltas.values()
    return [matrix.float().numpy() for delta in deltas for matrix in (delta.a, delta.b)]
