"""Heads that read every token: lexical weights and multi-vectors, as BGE-M3 has them beside its dense vector.

Weights: ``sparse_linear.safetensors`` [1, H] and ``colbert_linear.safetensors`` [D, H], with biases, beside the model's
own. They are published as pickles (`.pt`), which are never read: a pickle can run code. Formulas: arXiv 2402.03216,
section 3.2, as FlagEmbedding computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from serve_app.engine.encoder.types import TokenHead
from serve_app.models.loading.folder import UnsupportedModel

FILES: dict[TokenHead, str] = {"sparse": "sparse_linear", "colbert": "colbert_linear"}


@dataclass(slots=True)
class TokenHeads:
    """``linears``: the heads that are there. ``refused``: why others are not, where there is a reason to tell."""

    linears: dict[TokenHead, nn.Linear] = field(default_factory=dict)
    refused: dict[TokenHead, str] = field(default_factory=dict)

    def read(self, hidden: Tensor, lengths: list[int], wanted: Sequence[Sequence[TokenHead]]) -> list[Tensor]:
        """Hidden states [T, H] of concatenated sequences -> per sequence, one after the other as it wants them: lexical
        weights of its n tokens [n], and unit vectors of all but the first [(n - 1) * D], both float32."""
        sparse = self._apply("sparse", hidden, wanted)
        colbert = self._apply("colbert", hidden, wanted)
        rows, start = [], 0
        for length, heads in zip(lengths, wanted, strict=True):
            parts = []
            for head in heads:
                if head == "sparse" and sparse is not None:
                    parts.append(torch.relu(sparse[start : start + length, 0]))
                elif colbert is not None:
                    vectors = nn.functional.normalize(colbert[start + 1 : start + length], dim=-1)
                    parts.append(vectors.flatten())
            rows.append(torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32))
            start += length
        return rows

    def _apply(self, head: TokenHead, hidden: Tensor, wanted: Sequence[Sequence[TokenHead]]) -> Tensor | None:
        if not any(head in heads for heads in wanted):
            return None
        return self.linears[head](hidden).float()


def load_token_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> TokenHeads:
    """The heads in a checkpoint's folder. Raises :class:`UnsupportedModel` for one of a wrong shape."""
    heads = TokenHeads()
    for head, name in FILES.items():
        file = path / f"{name}.safetensors"
        if file.is_file():
            heads.linears[head] = _linear(file, head, hidden_size).to(device, dtype)
        elif (path / f"{name}.pt").is_file():
            heads.refused[head] = f"its {name}.pt is a pickle, which can run code; convert it to {file.name}"
    return heads


def _linear(file: Path, head: TokenHead, hidden_size: int) -> nn.Linear:
    from safetensors.torch import load_file

    tensors = load_file(file)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    rows = 1 if head == "sparse" else None
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden_size or rows not in (None, weight.shape[0]):
        found = "no weight" if weight is None else f"a weight of {list(weight.shape)}"
        raise UnsupportedModel(f"{file} has {found}; expected [{rows or 'D'}, {hidden_size}]")
    linear = nn.Linear(hidden_size, weight.shape[0], bias=bias is not None)
    linear.load_state_dict({name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None})
    return linear.requires_grad_(False).eval()
