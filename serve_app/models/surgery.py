"""Load-time replacements that make a model's own modules faster; each is checked numerically and left out where it differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from serve_app.engine.batch import build_batch
from serve_app.engine.request import Request, SamplingParams
from serve_app.engine.scheduler import Scheduled

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel


def optimise(model: CausalModel) -> dict[str, Any]:
    """Applies what pays on the model's device and returns a report for the log."""
    report: dict[str, Any] = {}
    if model.device.type == "cpu":
        from serve_app.kernels.linear import pack_linears
        from serve_app.kernels.norm import replace_rms_norms

        before = _probe(model)
        report["linears"] = str(pack_linears(model.module))
        report["norms"] = str(replace_rms_norms(model.module))
        after = _probe(model)
        scale = float(before.abs().max()) or 1.0
        error = float((before - after).abs().max()) / scale
        # bfloat16 keeps 8 bits; a replacement that is off by more than rounding is a wrong replacement.
        allowed = 0.05 if model.kv_shape.dtype == torch.bfloat16 else 1e-4
        if error > allowed:
            raise RuntimeError(f"the optimised model differs from the original by {error:.2g} (allowed {allowed:g})")
        report["relative_error"] = error
    return report


@torch.inference_mode()
def _probe(model: CausalModel) -> torch.Tensor:
    tokens = [(7 * i + 3) % min(model.vocab_size, 1000) for i in range(16)]
    kv = model.kv_shape.allocate(2, model.device)
    request = Request("probe", tokens, len(tokens), SamplingParams(), root=b"", blocks=[1])
    return model.forward(build_batch([Scheduled(request, 0, len(tokens), len(tokens))], kv)).float()
