"""Which operators a GPU gets: the Triton kernels once they have agreed with torch on the device, else torch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os

import torch

from serve_app.kernels.operators import Operators
from serve_app.kernels.reference.operators import TORCH

log = logging.getLogger(__name__)


def operators(device: torch.device) -> Operators:
    """The operators for tensors on ``device``; compiles and checks kernels on the first call (seconds once per
    machine, Triton keeps what it compiled).
    """
    return _checked(torch.device(device))[0]


def describe(device: torch.device) -> tuple[str, str]:
    """``("triton" | "torch", why)`` for ``device`` in this process."""
    found, why = _checked(torch.device(device))
    return found.name, why


@functools.cache
def takes_latents(device: torch.device) -> bool:
    """Whether attention on ``device`` can run over latents; models that have some keep heads' keys and values else."""
    found = operators(device)
    if found is TORCH or device.type != "cuda":
        return True
    from serve_app.kernels.gpu.selftest import check_latents

    try:
        check_latents(found, torch.bfloat16, device)
    except Exception as error:  # those of kernels and compilers have no base in common
        log.warning("attention over latents is not used, which take several times the memory as keys: %s", error)
        return False
    return True


@functools.cache
def _checked(device: torch.device) -> tuple[Operators, str]:
    wanted = os.environ.get("SERVE_APP_KERNELS")
    if wanted == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return triton_operators(), "SERVE_APP_KERNELS=triton, interpreted"  # for tests, and slow
    if device.type != "cuda":
        return TORCH, f"{device.type} tensors"
    if wanted == "torch":
        return TORCH, "SERVE_APP_KERNELS=torch"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return TORCH, f"compute capability {capability[0]}.{capability[1]}, and Triton's matrix products need 8.0"
    try:
        found = triton_operators()
        from serve_app.kernels.gpu.selftest import check

        worst = check(found, device)
    except Exception as error:  # whatever is wrong with a kernel, torch still gives right answers
        log.warning("Triton kernels unavailable, plain torch is used (several times slower): %s", error)
        return TORCH, f"{type(error).__name__}: {error}"
    found, without = _with_experts(found, device)
    return found, f"self-test error {worst:.1e}{without}"


@torch.inference_mode()
def _with_experts(found: Operators, device: torch.device) -> tuple[Operators, str]:
    """``found``, with torch's experts where its own fail: models without experts keep the other kernels. And why."""
    from serve_app.kernels.gpu.selftest import TOLERANCE, check_experts

    try:
        for dtype in TOLERANCE:
            check_experts(found, dtype, device)
    except Exception as error:
        log.warning("Triton's experts are not used, mixtures keep transformers' forward: %s", error)
        return dataclasses.replace(found, mix_experts=TORCH.mix_experts), f", without experts: {error}"
    return found, ""


def triton_operators() -> Operators:
    """The Triton kernels, unchecked. Raises ImportError without triton."""
    from serve_app.kernels.gpu import adapters, attention, experts, fused, sampling

    return Operators(
        "triton",
        fused.add_rms_norm,
        fused.rotate_and_write,
        fused.swiglu,
        attention.paged_attention,
        fused.write_kv,
        fused.quantize_rows,
        sampling.draw_truncated,
        adapters.add_deltas,
        experts.mix_experts,
    )
