"""A linear with adapters, as its device computes it best."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve_app.kernels.gpu.backend import operators
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, Rows
from serve_app.kernels.linear.device_delta import PARTS, DeviceAdapterLinear
from serve_app.kernels.linear.native_delta import NativeAdapterLinear
from serve_app.kernels.linear.panels import panel_library


def adapter_linear(
    inner: Linear, places: int, rows: Rows, widths: Sequence[int], columns: int, device: torch.device
) -> AdapterLinear:
    """In Triton on a GPU, in C++ where that takes the linear, else by torch's products."""
    if device.type == "cuda" and (add := operators(device).add_deltas) is not None and len(widths) <= PARTS:
        return DeviceAdapterLinear(add, inner, places, rows, widths, device)
    library = panel_library() if device.type == "cpu" and inner.dtype is torch.bfloat16 else None
    if library is not None:
        try:
            return NativeAdapterLinear(library, inner, places, rows, widths, columns)
        except ValueError:  # odd sizes
            pass
    return AdapterLinear(inner, places, rows, widths, device)
