"""What a rank runs on: memory, the rates that bound it, and what is kept free there."""

from __future__ import annotations

from dataclasses import dataclass

GiB = 1 << 30


@dataclass(slots=True, frozen=True)
class Device:
    """One rank's device. ``memory``: bytes that a program sees; rates are the vendor's peak values: ``bandwidth`` and
    ``link`` (to the other devices of a node, one direction) in bytes per second, ``flops`` of dense 16-bit and
    ``flops_8bit`` of 8-bit products. ``reserve``: bytes beside weights, activations and cache.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    flops_8bit: float
    link: float
    reserve: int = 768 << 20  # serve_app/engine/gpu/memory.py has the same
    cpu: bool = False


def _gpu(name: str, gib: float, bandwidth: float, flops: float, flops_8bit: float, link: float) -> Device:
    return Device(name, int(gib * GiB), bandwidth * 1e12, flops * 1e12, flops_8bit * 1e12, link * 1e9)


# Memory as the driver shows it to programs; rates from NVIDIA's data sheets, without sparsity.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.2, 3.35, 989, 1979, 450),
        _gpu("h200", 139.8, 4.8, 989, 1979, 450),
        _gpu("b200", 178.3, 8.0, 2250, 4500, 900),
        _gpu("a100", 79.2, 2.04, 312, 312, 300),
        _gpu("l40s", 44.4, 0.864, 362, 733, 32),
        _gpu("l4", 22.0, 0.3, 121, 242, 32),
        _gpu("rtx4090", 23.5, 1.008, 165, 330, 32),
    )
}


def cpu(memory: int, bandwidth: float = 40e9, threads: int = 2) -> Device:
    """A worker on a CPU; ``bandwidth`` is what ``python -m benchmarks engine`` calls the read bandwidth."""
    # 64 products and sums of bfloat16 a cycle and core, at 2.5 GHz.
    flops = threads * 64 * 2 * 2.5e9
    return Device("cpu", memory, bandwidth, flops, flops, bandwidth, reserve=0, cpu=True)
