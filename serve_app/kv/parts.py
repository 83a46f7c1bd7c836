"""Chunks in several objects: each rank of the worker that made one has published what it holds of it.

::

    whole    plane [layers, 2, blocks, Hkv, 32, D], plane by plane
    part     run [layers of the run, 2, blocks, heads of the run, 32, D], run by run

A part says of which layers and heads it is, so that a reader takes from each what it wants, however its own layers and
heads are divided. Together parts have every head of every layer once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.chunk import BadChunk, check_payload
from serve_app.kv.keys import BLOCK_TOKENS
from serve_app.wire.parts import Part, Run


@dataclass(slots=True, frozen=True)
class Parted:
    """What a pool keeps of a chunk in several objects: a reference for each of ``parts``."""

    parts: tuple[Part, ...]
    refs: tuple[Any, ...]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Payload:
    """What has been read of a chunk: flat uint8 ``arrays`` of ``parts``, which may be some of all; no parts: one array
    that is the whole. ``ticket``: under which the other ranks of the reader's worker have read theirs, 0 for none.
    """

    parts: tuple[Part, ...]
    arrays: tuple[NDArray[np.uint8], ...]
    ticket: int = 0

    @property
    def one_piece(self) -> bool:
        """A process that needs none of the parts has no arrays."""
        return not self.parts and len(self.arrays) == 1


def layers_of(run: Run) -> range:
    """Of the model."""
    return range(run.layer, run.layer + run.layers)


def run_bytes(run: Run) -> int:
    """Of a block."""
    return run.layers * run.sides * run.heads * BLOCK_TOKENS * run.width


def block_bytes(part: Part) -> int:
    return sum(run_bytes(run) for run in part.runs)


def check_parts(parts: Sequence[Part], whole_bytes: int) -> None:
    """Raises :class:`BadChunk` unless ``parts`` have each head of each layer once, in ``whole_bytes`` a block."""
    heads: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        for run in part.runs:
            if min(run.layer, run.head) < 0 or min(run.layers, run.heads, run.sides, run.width) < 1:
                raise BadChunk(f"{run} is no run of layers")
            for layer in range(run.layer, run.layer + min(run.layers, 1 << 16)):
                heads.setdefault(layer, []).append((run.head, run.head + run.heads))
    for layer, found in heads.items():
        ends = [(0, 0), *sorted(found)]
        if any(after[0] != before[1] for before, after in pairwise(ends)):
            raise BadChunk(f"parts have heads {sorted(found)} of layer {layer}")
    if sorted(heads) != list(range(len(heads))) or sum(map(block_bytes, parts)) != whole_bytes:
        raise BadChunk(f"parts of layers {sorted(heads)} do not make blocks of {whole_bytes} bytes")


def check_read(payload: object, nbytes: int, blocks: int) -> None:
    """Raises :class:`BadChunk` where ``payload`` is not what was read of a chunk of so many bytes and blocks."""
    if not isinstance(payload, Payload):
        check_payload(payload, nbytes)
    elif payload.one_piece:
        check_payload(payload.arrays[0], nbytes)
    else:
        for part, array in zip(payload.parts, payload.arrays, strict=True):
            check_payload(array, blocks * block_bytes(part))


def run_views(part: Part, array: NDArray[np.uint8], blocks: int) -> list[tuple[Run, NDArray[np.uint8]]]:
    """Each run's [layers, sides, blocks, heads, 32, width]."""
    found, at = [], 0
    for run in part.runs:
        size = blocks * run_bytes(run)
        shape = (run.layers, run.sides, blocks, run.heads, BLOCK_TOKENS, run.width)
        found.append((run, array[at : at + size].reshape(shape)))
        at += size
    return found


def together(parts: Sequence[Part], arrays: Sequence[NDArray[np.uint8]], blocks: int) -> NDArray[np.uint8]:
    """The whole payload, as one process would have published it."""
    views = [pair for part, array in zip(parts, arrays, strict=True) for pair in run_views(part, array, blocks)]
    shapes: dict[int, tuple[int, int, int]] = {}
    for run, _ in views:
        for layer in layers_of(run):
            before = shapes[layer][1] if layer in shapes else 0
            shapes[layer] = (run.sides, max(before, run.head + run.heads), run.width)
    planes: dict[tuple[int, int, int], list[int]] = {}
    for layer in sorted(shapes):
        planes.setdefault(shapes[layer], []).append(layer)
    whole = np.empty(sum(map(block_bytes, parts)) * blocks, np.uint8)
    targets: dict[int, NDArray[np.uint8]] = {}
    at = 0
    for (sides, count, width), layers in planes.items():
        size = len(layers) * sides * blocks * count * BLOCK_TOKENS * width
        plane = whole[at : at + size].reshape(len(layers), sides, blocks, count, BLOCK_TOKENS, width)
        targets |= {layer: plane[place] for place, layer in enumerate(layers)}
        at += size
    for run, view in views:
        for layer, of_it in zip(layers_of(run), view, strict=True):
            targets[layer][:, :, run.head : run.head + run.heads] = of_it
    return whole
