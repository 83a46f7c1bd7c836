"""Whether a training run fits this machine, asked before it begins."""

from __future__ import annotations

from pathlib import Path

import torch

from serve_app.models.load import CausalModel


class TooLittleMemory(ValueError):
    """The text says how much is needed, how much there is, and what to lower."""


def bytes_needed(parameters: int, batch_tokens: int, vocab: int, hidden: int, depth: int) -> int:
    """An estimate: weights, gradients and two optimiser moments, the teacher's logits, and activations."""
    weights = 16 * parameters
    logits = 4 * 3 * batch_tokens * vocab
    activations = 4 * 24 * batch_tokens * hidden * depth
    return weights + logits + activations


def require_memory(parameters: int, batch_tokens: int, model: CausalModel, depth: int) -> None:
    """Raises :class:`TooLittleMemory` if the estimate is more than what is free on the model's device."""
    needed = bytes_needed(parameters, batch_tokens, model.vocab_size, _hidden(model), depth)
    free = free_bytes(model.device)
    if free is not None and needed > free:
        raise TooLittleMemory(
            f"training needs about {needed / 2**30:.1f} GiB beside the model, and {free / 2**30:.1f} GiB are free; "
            "lower --batch-tokens, --draft-vocab or the draft's size"
        )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a CUDA device or this machine (Linux); None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _hidden(model: CausalModel) -> int:
    from typing import Any

    module: Any = model.module
    return int(module.config.get_text_config().hidden_size)
