"""What layers that keep states of a text take, found on a model without memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from serve_app.engine.states import StateShape
from serve_app.models.compressed import with_streams, wrap_compressed
from serve_app.models.peak import peak_bytes
from serve_app.models.stateful import StatefulLayer, showing, wrap_stateful

# Rows of texts by which a pass's need is told.
PEAK_ROWS = (256, 512)


@dataclass(slots=True, frozen=True)
class StateNeeds:
    """``states``: bytes of one text's state by layer. A pass over so many rows takes at its peak ``fixed`` and ``each``
    bytes a row within such a layer."""

    states: dict[int, int]
    fixed: float = 0.0
    each: float = 0.0


def state_needs(module: nn.Module, hidden: int, dtype: torch.dtype) -> StateNeeds:
    """Of a model on the device "meta", which is not used any more afterwards."""
    states: defaultdict[int, int] = defaultdict(int)
    peaks: dict[type, tuple[int, int]] = {}
    for layer in wrap_stateful(module):
        with torch.inference_mode(), showing([layer]):
            layer(torch.empty((1, 4, hidden), dtype=dtype, device="meta"))
        states[int(layer.module.layer_idx)] += layer.shape.bytes
        if type(layer.module) not in peaks:
            few, many = (_peak(layer, hidden, dtype, rows) for rows in PEAK_ROWS)
            peaks[type(layer.module)] = few, many
    for compressor in wrap_compressed(module):
        states[int(compressor.owner.layer_idx)] += with_streams(StateShape(), [compressor]).bytes
    few, many = max(peaks.values(), key=lambda found: found[1], default=(0, 0))
    each = (many - few) / (PEAK_ROWS[1] - PEAK_ROWS[0])
    return StateNeeds(dict(states), max(0.0, few - each * PEAK_ROWS[0]), each)


def _peak(layer: StatefulLayer, hidden: int, dtype: torch.dtype, rows: int) -> int:
    given = torch.empty((1, rows, hidden), dtype=dtype, device="meta")
    with showing([layer]):
        return peak_bytes(lambda: layer(given), [given], [*layer.module.parameters(), *layer.module.buffers()])
