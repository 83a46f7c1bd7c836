"""Weight quantisation of a loaded model: its linears keep the rounded values and carry the codes they came from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from serve_app.kernels.linear.quantize import obstacle, quantize

BITS = {"int8": 8, "int4": 4}
NAMES = ("none", *BITS)


def quantize_linears(model: nn.Module, name: str) -> str:
    """Rounds the weights of all ``nn.Linear`` to ``name`` (``int8``, ``int4``) and says what was done.

    The output head keeps 8 bits in any case: its errors go straight into the choice of tokens. Embeddings stay, a tied
    head gets a weight of its own. A module's codes are its attribute ``quantized``
    (:class:`serve_app.kernels.linear.quantize.Quantized`).
    """
    done, left = 0, 0
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        if obstacle(module.weight) is not None:
            left += 1
            continue
        codes = quantize(module.weight.detach(), 8 if module is head else BITS[name])
        values = codes.dequantize(module.weight.dtype).to(module.weight.device)
        module.weight = nn.Parameter(values, requires_grad=False)
        module.quantized = codes  # type: ignore[assignment]
        done += 1
    return f"{name}, {done} linears" + (f"; {left} left as they are (columns are no multiple of 64)" if left else "")


def codes_of(module: nn.Module) -> list:
    """The codes of a linear that :func:`quantize_linears` has rounded, else nothing."""
    found = getattr(module, "quantized", None)
    return [] if found is None or isinstance(found, torch.Tensor) else [found]
