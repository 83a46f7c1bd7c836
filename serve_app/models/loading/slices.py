"""A checkpoint's tensors, of which what is asked for is read, and how many bytes that was."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Tally:
    """Bytes as they lie in files, packed ones packed. What is read twice counts twice."""

    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # transformers reads in several threads

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count


@dataclass(slots=True, frozen=True)
class CountedSlice:
    """A tensor of a file, as safetensors gives it, whose reads are counted."""

    slice: Any
    tally: Tally

    def get_shape(self) -> list[int]:
        return list(self.slice.get_shape())

    def get_dtype(self) -> str:
        return str(self.slice.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self.slice[index]
        self.tally.add(found.nbytes)
        return found


def open_slices(files: list[str], opened: ExitStack, tally: Tally | None = None) -> dict[str, Any]:
    """Every tensor of ``files`` by its name, until ``opened`` ends; with a ``tally`` each read is counted there."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in files:
        handle = opened.enter_context(safe_open(file, framework="pt"))
        for name in handle.keys():  # noqa: SIM118
            tensor = handle.get_slice(name)
            found[name] = tensor if tally is None else CountedSlice(tensor, tally)
    return found
