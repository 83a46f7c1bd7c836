"""The routed experts of a mixture as three stacked weights, which are views of the model's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.kernels.coded import Coded
from serve_app.kernels.mixture import Gate, MixtureWeight


@dataclass(slots=True, frozen=True)
class Experts:
    """``gate`` and ``up`` [E, I, H], ``down`` [E, H, I], of any strides or in four bits, with biases [E, I] and [E, H]
    or None. ``gate`` and ``up`` lie alike.
    """

    gate: Tensor | Coded
    up: Tensor | Coded
    down: Tensor | Coded
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Gate

    @property
    def bytes_of_one(self) -> int:
        """What reading one expert's weights takes."""
        return sum(_bytes(weight) // len(weight) for weight in (self.gate, self.up, self.down))


def _bytes(weight: Tensor | Coded) -> int:
    return weight.nbytes if isinstance(weight, Coded) else weight.numel() * weight.element_size()


def stack(weight: MixtureWeight) -> Experts:
    """The routed experts of ``weight``, without a copy. Raises ValueError where they don't lie at equal distances."""
    count = len(weight.gate_up) - weight.shared
    first, second = weight.gate_up[:count], weight.down[:count]
    biased = bool(first[0].biases)
    gate, up = (_stacked([each.parts[half] for each in first]) for half in (0, 1))
    if gate.stride() != up.stride():
        raise ValueError("gates do not lie as ups do")
    return Experts(
        gate=gate,
        up=up,
        down=_stacked([each.parts[0] for each in second]),
        gate_bias=_stacked([each.biases[0] for each in first]) if biased else None,
        up_bias=_stacked([each.biases[1] for each in first]) if biased else None,
        down_bias=_stacked([each.biases[0] for each in second]) if second[0].biases else None,
        activation=weight.gate,
    )


def _stacked(views: Sequence[Tensor]) -> Tensor:
    head = views[0]
    distance = views[1].storage_offset() - head.storage_offset() if len(views) > 1 else head.numel()
    for index, view in enumerate(views):
        same = view.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
        if not same or view.stride() != head.stride() or view.shape != head.shape:
            raise ValueError("experts do not lie in one tensor")
        if view.storage_offset() != head.storage_offset() + index * distance:
            raise ValueError("experts do not lie at equal distances")
    return torch.as_strided(head, (len(views), *head.shape), (distance, *head.stride()), head.storage_offset())
