"""Weights from safetensors files straight to a device, at the speed of the disk or of the page cache.

Several threads read slices of the files into page-locked memory and copy them to the device on streams of their own, so
that reading, copying and the next read go on at the same time. Only checkpoints whose names are the model's own are
taken; whatever transformers has to rename, merge or convert goes through its ``from_pretrained``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.models.loading.generation import take_generation_config

THREADS = 4
SLICE = 32 << 20  # bytes that a thread reads at a time
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Progress = Callable[[str], None]


class NotPlain(ValueError):
    """The checkpoint is not one tensor per parameter; the text names the first difference."""


@dataclass(slots=True, frozen=True)
class Stored:
    """One tensor's bytes [begin, end) in ``file``."""

    file: Path
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What the directory's ``*.safetensors`` hold, by name. The format: 8 bytes of length, JSON, data
    (github.com/huggingface/safetensors). Raises :class:`NotPlain` for other number formats.
    """
    found: dict[str, Stored] = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise NotPlain(f"{name} is stored as {entry['dtype']}")
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = Stored(file, begin, end, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return found


def load_module(
    model_class: Any,
    path: Path,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda stage: None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of ``path`` on ``device`` and what loading took: bytes and seconds. Raises :class:`NotPlain`."""
    stored = stored_tensors(path)
    config = model_class.config_class.from_pretrained(path, local_files_only=True)
    with _parameters_without_memory():
        module = model_class._from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if unknown := sorted(set(stored) - set(parameters)):
        raise NotPlain(f"the model has no {unknown[0]}")
    targets: dict[str, Tensor] = {}
    for name, where in stored.items():
        if tuple(parameters[name].shape) != where.shape:
            raise NotPlain(f"{name} has shape {where.shape} and not {tuple(parameters[name].shape)}")
        targets[name] = torch.empty(where.shape, dtype=dtype, device=device)
    if device.type == "cuda":
        # Memory that was just freed may still be written to by the stream that had it.
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    copied = _copy_all(stored, targets, device, progress)
    seconds = time.perf_counter() - started
    for name, tensor in targets.items():
        owner, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(owner), own_name, nn.Parameter(tensor, requires_grad=False))
    module.tie_weights()
    missing = [name for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta]
    if missing:
        raise NotPlain(f"the checkpoint has no {missing[0]}")
    module.to(device)  # buffers
    take_generation_config(module, path)
    return module, {"weight_bytes": copied, "weights_s": round(seconds, 2)}


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules made inside have parameters on the meta device; their buffers are computed as ever."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(self, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _copy_all(
    stored: dict[str, Stored], targets: dict[str, Tensor], device: torch.device, progress: Progress
) -> int:  # fmt: skip
    """Fills ``targets`` from the files; returns the bytes read."""
    total = sum(where.end - where.begin for where in stored.values())
    done, lock, said = 0, threading.Lock(), time.monotonic()
    local = threading.local()

    def copy(name: str) -> None:
        nonlocal done, said
        if not hasattr(local, "reader"):
            local.reader = _Reader(device)
        local.reader.copy(stored[name], targets[name])
        with lock:
            done += stored[name].end - stored[name].begin
            if time.monotonic() - said > 0.5:
                said = time.monotonic()
                progress(f"loading weights {100 * done // total} %")

    # Large tensors first, so that no thread is left with one at the end.
    order = sorted(stored, key=lambda name: stored[name].begin - stored[name].end)
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(copy, order):
            pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return total


class _Reader:
    """One thread's two staging buffers: while one is on its way to the device, the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.buffers = [torch.empty(SLICE, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self.free: list[torch.cuda.Event | None] = [None, None]
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.turn = 0

    def copy(self, where: Stored, target: Tensor) -> None:
        item = where.dtype.itemsize
        flat = target.view(-1)
        with where.file.open("rb", buffering=0) as stream:
            for begin in range(where.begin, where.end, SLICE):
                size = min(SLICE, where.end - begin)
                self.turn ^= 1
                if (event := self.free[self.turn]) is not None:
                    event.synchronize()
                buffer = self.buffers[self.turn][:size]
                _read(stream.fileno(), buffer, begin)
                first = (begin - where.begin) // item
                part = flat[first : first + size // item]
                if self.stream is None:
                    part.copy_(buffer.view(where.dtype))
                    continue
                with torch.cuda.stream(self.stream):
                    read = buffer.view(where.dtype)
                    # Converted on the device: a copy that converts would do it on the host, and wait.
                    source = read if part.dtype == read.dtype else read.to(part.device, non_blocking=True)
                    part.copy_(source, non_blocking=True)
                    self.free[self.turn] = event = torch.cuda.Event()
                    event.record()


def _read(file: int, buffer: Tensor, offset: int) -> None:
    array: Any = buffer.numpy()
    view = memoryview(array)
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise OSError("the file ends before its tensors do")
        done += count
