"""What two ways to compute one model are compared by: the same few prompts, and how far their logits are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.request import Request
from serve_app.engine.runner import Forward
from serve_app.engine.step import Scheduled, build_batch
from serve_app.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel


def difference(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of ``want``."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-30))


@torch.inference_mode()
def probe(model: CausalModel, forward: Forward) -> Tensor:
    """Logits float32 of two prompts, one over a block's border, and of a token behind each."""
    vocab = min(model.vocab_size, 1000)
    prompts = [[(7 * i + 3) % vocab for i in range(40)], [(11 * i + 5) % vocab for i in range(6)]]
    kv = model.kv_shape.allocate(4, model.device, slots=2)
    requests = [
        Request(str(i), prompt, len(prompt), SamplingParams(), root=b"", blocks=blocks, state=1 + i)
        for i, (prompt, blocks) in enumerate(zip(prompts, ([1, 3], [2]), strict=True))
    ]
    prefill = [Scheduled(r, 0, len(r.tokens) - 1, len(r.tokens) - 1) for r in requests]
    decode = [Scheduled(r, len(r.tokens) - 1, 1, 1) for r in requests]
    return torch.cat([forward(build_batch(step, kv)).float() for step in (prefill, decode)])
