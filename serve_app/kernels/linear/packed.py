"""CPU linears on weights laid out once: in panels of our own where the CPU multiplies those, else in oneDNN's blocks.

``F.linear`` lets oneDNN read the row-major weight on every call; a packed form needs the same bytes, serves every batch
size and gives the same result. oneDNN's two operators are private to torch (they are what inductor's freezing emits),
so each packed layer is checked against ``F.linear`` before it replaces anything.
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.kernels.linear.panels import PanelLinears, PanelStore, panel_bytes, panel_library
from serve_app.kernels.linear.quantize import Quantized

log = logging.getLogger(__name__)

# Classes of transformers that are linears: GPT-2's has its weight transposed, Falcon's adds its bias in a second step.
TRANSPOSED = "Conv1D"
_PLAIN = frozenset({TRANSPOSED, "FalconLinear"})
# Largest difference from F.linear, as a share of the largest output.
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
# Where activations are rounded to 8 bits as well.
TOLERANCE_QUANTIZED = 2**-5


@dataclass(slots=True)
class PackReport:
    """What :func:`pack_linears` did. ``skipped`` maps module names to reasons; ``bytes`` counts packed
    weights, ``panels`` how many are in panels, and ``quantized`` how many of those in fewer bits."""

    packed: int = 0
    panels: int = 0
    quantized: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"packed {self.packed} linears ({self.bytes / 1e6:.1f} MB) in {self.seconds:.2f} s"
        text += f", {self.panels} of them in panels" if self.panels else ""
        text += f", {self.quantized} quantised" if self.quantized else ""
        reasons = Counter(self.skipped.values())
        return text + "".join(f"; {count} left as they are: {reason}" for reason, count in reasons.items())


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference on CPU: [..., in_features] -> [..., out_features] in the weight's dtype.

    Holds no parameters, so that the row-major weight can be freed; :attr:`weight` rebuilds it. With ``store`` the
    weight lies there in panels, in fewer bits where it comes with its ``codes``. Raises RuntimeError or ValueError
    where it can't be packed.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, store: PanelStore | None = None, codes: Quantized | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias: Tensor | None = None if bias is None else bias.detach()
        # A plain attribute: looking a Parameter up through nn.Module.__getattr__ shows in a step of hundreds of layers.
        self.weights: PanelLinears | _OneDnn
        self.quantized = codes is not None and store is not None
        if store is not None:
            self.weights = PanelLinears(store, [weight] if codes is None else [codes], [self.bias])
        else:
            self.weights = _OneDnn(weight.detach(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x)

    @property
    def weight(self) -> Tensor:
        """A fresh row-major copy [out_features, in_features] (a full conversion: not for the hot path)."""
        return self.weights.weight()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _OneDnn:
    """One weight in oneDNN's blocks."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias, self._apply = bias, torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x, self.packed, self._bias, "none", [], "")

    def weight(self) -> Tensor:
        return self.packed.to_dense()


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this torch build and CPU can pack linears of ``dtype`` (float32, bfloat16)."""
    if dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or bool(ops._is_mkldnn_bf16_supported())


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the model's linears in panels, experts among them."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == TRANSPOSED]
    weights = [_weight_of(linear) for linear in linears] + [p for p in model.parameters() if p.ndim == 3]
    return sum(panel_bytes(weight) for weight in weights)


def pack_linears(model: nn.Module, *, exclude: Collection[str] = (), store: PanelStore | None = None) -> PackReport:
    """Replaces the model's ``nn.Linear`` modules by :class:`PackedLinear` where that is possible and agrees; GPT-2's
    ``Conv1D`` and Falcon's ``FalconLinear`` (of transformers) as well. Weights in bfloat16 go into ``store`` where
    there is one.

    ``exclude`` holds shell patterns over qualified names (``"*.router"``). Other subclasses of nn.Linear, modules
    with hooks and tensors that are not on CPU stay. Original weights are freed unless something else holds
    them: a tied lm_head thus costs one extra copy of the embedding. Call under no other thread's forward;
    inference only.
    """
    report, started = PackReport(), time.monotonic()
    done: dict[int, PackedLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.Linear) and type(module).__name__ != TRANSPOSED:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and (shared := done.get(id(module))):
            setattr(parent, name.rpartition(".")[2], shared)
            continue
        reason = _obstacle(name, module, exclude)
        packed = None if reason else _pack_checked(module, store)
        if packed is None:
            report.skipped[name] = reason or "packed result differs from F.linear"
            continue
        setattr(parent, name.rpartition(".")[2], packed)
        done[id(module)] = packed
        report.packed += 1
        report.panels += isinstance(packed.weights, PanelLinears)
        report.quantized += packed.quantized
        report.bytes += module.weight.numel() * module.weight.element_size()
    report.seconds = time.monotonic() - started
    if any("differs" in reason or "cannot" in reason for reason in report.skipped.values()):
        log.warning("%s", report)
    return report


def _weight_of(module: Any) -> Tensor:
    """[out_features, in_features]"""
    return module.weight.t() if type(module).__name__ == TRANSPOSED else module.weight


def _obstacle(name: str, module: nn.Module, exclude: Collection[str]) -> str | None:
    weight = _weight_of(module)
    if not name:
        return "is the model itself"
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
        return "excluded"
    if type(module) is not nn.Linear and type(module).__name__ not in _PLAIN:
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if weight.device.type != "cpu":
        return f"on {weight.device.type}"
    if not packing_available(weight.dtype):
        return f"this torch cannot pack {weight.dtype} on this CPU"
    return None


@torch.inference_mode()
def _pack_checked(module: Any, store: PanelStore | None) -> PackedLinear | None:
    """The first way of packing that agrees with the module itself."""
    weight = _weight_of(module)
    ways: list[tuple[PanelStore | None, Quantized | None]] = [(None, None)]
    if store is not None and weight.dtype is torch.bfloat16:
        codes = getattr(module, "quantized", None)
        known = isinstance(codes, Quantized) and panel_library(quantized=True) is not None
        ways = [*([(store, codes)] if known else []), (store, None), *ways]
    for way in ways:
        try:
            packed = PackedLinear(weight, module.bias, *way)
            if _agrees(packed, module, weight.dtype):
                return packed
        except (RuntimeError, ValueError) as error:
            log.info("packing a %s linear failed: %s", tuple(weight.shape), error)
    return None


def _agrees(packed: PackedLinear, module: Any, dtype: torch.dtype) -> bool:
    tolerance = TOLERANCE_QUANTIZED if packed.quantized else _TOLERANCE[dtype]
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3):  # matrix-vector and matrix-matrix kernels are different code in oneDNN
        x = torch.randn(rows, packed.in_features, generator=generator).to(dtype)
        want, got = module(x).float(), packed(x).float()
        limit = tolerance * float(want.abs().max()) + 1e-30
        if not float((got - want).abs().max()) <= limit:
            return False
    return True
