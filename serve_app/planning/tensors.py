"""The tensors of a checkpoint, by what they are for: from the headers of safetensors files, or from a configuration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "U16": 16, "U32": 32, "U64": 64,
}  # fmt: skip
VISION = "vision"
# The first that matches a name says what a tensor is for.
ROLES = (
    (VISION, r"(^|\.)(vision|visual|audio|image|multi_modal|multimodal|mm_projector)"),
    ("norms", r"(norm|ln_\w+|layernorm)[^.]*(\.(weight|bias))?$"),
    ("experts", r"\.experts(\.|$)|\.block_sparse_moe\.(input|output)_linear\."),
    ("shared experts", r"shared_expert"),
    ("routers", r"\.(gate|router)(\.|$)"),
    ("indexers", r"\.indexer\."),
    ("latent projections", r"\.(q_a_proj|kv_a_proj_with_mqa)\."),
    ("embedding", r"(^|\.)(embed_tokens|embed|wte|word_embeddings|embed_in|embeddings)\."),
    ("head", r"^(lm_head|head|embed_out|language_model\.lm_head)\."),
    ("attention", r"\.(self_attn|attn|attention|self_attention|linear_attn|mixer|mamba|conv)\."),
    ("mlp", r"\.(mlp|shared_mlp|feed_forward|ffn|block_sparse_moe|moe)\."),
)
# What ranks that divide layers hold whole, of models whose layers keep states.
UNDIVIDED = "not divided"
_PATTERNS = [(role, re.compile(pattern)) for role, pattern in ROLES]
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# Beside packed codes: numbers that no row is multiplied with.
_SCALES = re.compile(r"(scale|scales|scale_inv|_scale_\w+|zero_point|qzeros|g_idx|weight_shape)$")
_KEYS = re.compile(r"\.[kv]_proj\.")
_PACKED = re.compile(r"(weight_packed|qweight|_blocks)$")


class NoTensors(ValueError):
    """Neither files nor a configuration say what the model consists of; the text has the remedy."""


@dataclass(slots=True, frozen=True)
class Tensor:
    """``values`` are weights that rows are multiplied with (0 for scales); ``bytes`` what they take as they are
    stored.
    """

    name: str
    values: int
    bytes: int
    shape: tuple[int, ...] = ()
    whole: bool = False  # every rank of a stage has all of it, though others of its role are divided
    aside: bool = False  # it is of what sees or hears, whatever it is called
    # Of modules: what it is there: "linear" for a linear's weight, which is rounded and packed, "packed" for one that
    # is packed alone, "other". "": files do not say.
    kind: str = ""
    passing: int = 0  # bytes that it takes beside these until the model is loaded

    @property
    def role(self) -> str:
        if self.aside:
            return VISION
        if self.whole:
            return UNDIVIDED
        return next((role for role, pattern in _PATTERNS if pattern.search(self.name)), "others")

    @property
    def makes_keys(self) -> bool:
        """Whether it is a projection to keys or values and nothing else."""
        return _KEYS.search(self.name) is not None

    @property
    def below(self) -> str:
        """Its name from the number of its layer on."""
        found = _LAYER.search(self.name)
        return self.name[found.start(1) :] if found else self.name

    @property
    def layer(self) -> int | None:
        """The layer of the text model; None for what stands beside its layers."""
        found = None if self.role == VISION else _LAYER.search(self.name)
        return int(found[1]) if found else None


def from_headers(headers: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Of parsed headers, each a table from names to dtype and shape."""
    found = []
    for header in headers:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _ITEM_BITS:
                raise NoTensors(f"{name} is stored as {entry['dtype']}, which this version does not know")
            count, bits = math.prod(entry["shape"]), _ITEM_BITS[entry["dtype"]]
            values = 0 if _SCALES.search(name) else count
            if _PACKED.search(name):  # four bits each
                values = count * bits // 4
            found.append(Tensor(name, values, count * bits // 8, tuple(entry["shape"])))
    return found


def read_headers(folder: Path) -> list[Tensor]:
    """What the safetensors files of ``folder`` hold; [] where there are none. The format is 8 bytes of length, a header
    in JSON, then data (github.com/huggingface/safetensors).
    """
    headers = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                raise NoTensors(f"{file} is damaged: its header ends behind the file; fetch it again")
            headers.append(json.loads(stream.read(length)))
    return from_headers(headers)
