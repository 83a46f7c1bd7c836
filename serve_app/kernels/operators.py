"""The operators between a layer's matrix products, as a set that one device runs in one launch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class Operators:
    """A consistent set of the functions of ``kernels/reference/operators.py``; ``name`` says which for the log."""

    name: str
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate_and_write: Callable[..., Tensor]
    swiglu: Callable[[Tensor], Tensor]
    attention: Callable[..., Tensor]
    write_kv: Callable[..., None]
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    # What replaces a sort when tokens are drawn; None: there is nothing better.
    draw_truncated: Callable[..., None] | None
    # What adds the deltas of adapters to a linear's result; None: torch's products, one adapter after the other.
    add_deltas: Callable[..., None] | None
    mix_experts: Callable[..., Tensor]
