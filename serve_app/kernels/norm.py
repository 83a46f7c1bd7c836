"""RMSNorm in one C++ call instead of six torch operators, where it gives what the model's own module
gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
# Share of elements that may differ from the module's own output, by one rounding step: the order of a sum
# differs.
_MAX_MISMATCH = 0.02


@dataclass(slots=True)
class FastRMSNorm:
    """Takes the place of one module's ``forward``; anything the kernel does not take goes to ``original``."""

    library: native.Library
    original: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    weight: Tensor  # float32 [dim], with the variant's offset added
    eps: float
    round_first: bool

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is self.dtype and x.is_contiguous() and not x.is_cuda:
            return native.rms_norm(self.library, x, self.weight, self.eps, self.round_first)
        return self.original(x)


def replace_rms_norms(model: nn.Module) -> int:
    """Gives each RMSNorm-like module on CPU the C++ forward where a numeric check agrees; returns how many.

    A module qualifies by its name (``*RMSNorm``), a 1-D weight (float32 or bfloat16, a multiple of 16 long)
    and an epsilon. Its variant (weight or 1 + weight; rounding before or after the weight) is found by
    comparing outputs, not by class. Modules keep their names and parameters: only ``forward`` of the instance
    changes. Inference only.
    """
    library = cpu_library()
    if library is None:
        return 0
    replaced = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and (fast := _matching(library, module)):
            module.forward = fast
            replaced += 1
    return replaced


@torch.inference_mode()
def _matching(library: native.Library, module: nn.Module) -> FastRMSNorm | None:
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    # A buffer of ones stands for a norm without weights, on rows of any length.
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float) or weight.is_cuda:
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16) or len(weight) % 16 or "forward" in vars(module):
        return None
    generator = torch.Generator().manual_seed(0)
    # Scales from where epsilon matters to large activations.
    x = torch.randn(3, 8, len(weight), generator=generator) * torch.tensor([1e-3, 1.0, 1e2]).view(3, 1, 1)
    x = x.to(weight.dtype)
    want = module(x)
    if want.dtype is not x.dtype or want.shape != x.shape:
        return None
    best, fewest = None, _MAX_MISMATCH
    for offset in (0.0, 1.0):
        for round_first in (True, False):
            scale = (weight.detach().float() + offset).contiguous()
            fast = FastRMSNorm(library, module.forward, x.dtype, scale, eps, round_first)
            mismatch = _mismatch(fast(x), want)
            if mismatch < fewest:
                best, fewest = fast, mismatch
    return best


def _mismatch(got: Tensor, want: Tensor) -> float:
    """Share of elements that differ (float32: by more than 4 steps); 1.0 when any differs by much more than
    that."""
    step = torch.finfo(want.dtype).eps
    error, size = (got.float() - want.float()).abs(), want.float().abs()
    if not bool((error <= 4 * step * size + 1e-30).all()):
        return 1.0
    return float((error > (4 * step if want.dtype is torch.float32 else 0) * size).float().mean())
