"""K/V of payloads in parts (:mod:`serve_app.kv.parts`), in and out of a cache of some layers and heads of a model.

::

    part     layers 0-3, heads 0-3 ---+
    part     layers 0-3, heads 4-7 -+ |
                                    | v
    cache    layers 2-5, heads 2-5: takes layers 2-3, heads 2-3 of the one and 4-5 of the other, and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.block_copies import raw, write_blocks
from serve_app.kv.parts import Payload, block_bytes, layers_of, run_views
from serve_app.wire.parts import Part, Run

if TYPE_CHECKING:
    from serve_app.engine.kv_cache import KVCache, KVShape


@dataclass(slots=True, frozen=True)
class Held:
    """A run of a model's layers that a cache holds, from place ``at`` of plane ``plane`` on."""

    run: Run
    plane: int
    at: int


def held(
    shape: KVShape, numbers: Sequence[int], heads: Sequence[int], only: Sequence[bool] | None = None
) -> list[Held]:
    """What a cache of ``shape`` holds, whose layers have these ``numbers`` in the model and begin with these ``heads``;
    of those that ``only`` says.
    """
    found: list[Held] = []
    item = shape.dtype.itemsize
    for plane, distinct in enumerate(dict.fromkeys(shape.layers)):
        members = [index for index, layer in enumerate(shape.layers) if layer == distinct]
        for at, index in enumerate(members):
            if only is not None and not only[index]:
                continue
            last = found[-1] if found else None
            run = last.run if last is not None else None
            if (
                last is not None and run is not None and last.plane == plane and last.at + run.layers == at
                and run.layer + run.layers == numbers[index] and run.head == heads[index]
            ):  # fmt: skip
                longer = Run(run.layer, run.layers + 1, run.head, run.heads, run.sides, run.width)
                found[-1] = Held(longer, plane, last.at)
                continue
            one = Run(numbers[index], 1, heads[index], distinct.kv_heads, distinct.parts, distinct.head_dim * item)
            found.append(Held(one, plane, at))
    return found


def held_whole(shape: KVShape) -> list[Held]:
    """What the cache of a model in one process holds."""
    return held(shape, range(len(shape.layers)), [0] * len(shape.layers))


def part_of(runs: Sequence[Held], *, away: bool = False) -> Part:
    """What :func:`take_part` takes."""
    return Part(tuple(each.run for each in runs), away)


def needs(runs: Sequence[Held], part: Part) -> bool:
    """Whether a cache that holds ``runs`` takes anything of ``part``."""
    return any(_shared(mine.run, run) is not None for mine in runs for run in part.runs)


def fits(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether ``parts`` are of a model whose chunks in one piece lie as ``whole`` says."""
    shapes = {layer: (run.sides, run.width) for run in whole.runs for layer in layers_of(run)}
    runs = [run for part in parts for run in part.runs]
    return all(shapes.get(layer) == (run.sides, run.width) for run in runs for layer in layers_of(run))


def take_part(kv: KVCache, runs: Sequence[Held], blocks: list[int]) -> Tensor:
    """What ``blocks`` hold of ``runs``: flat uint8 on the cache's device, a tensor of its own."""
    if not runs:
        return torch.empty(0, dtype=torch.uint8, device=kv.device)
    index = kv.index(blocks)
    taken = [raw(kv.planes[each.plane])[each.at : each.at + each.run.layers].index_select(2, index) for each in runs]
    flat = [each.view(torch.uint8).flatten() for each in taken]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def put_parts(kv: KVCache, runs: Sequence[Held], blocks: list[int], payload: Payload, first: int) -> None:
    """Overwrites ``blocks`` with as many of ``payload`` from its ``first`` on, in all layers and heads of ``runs``.
    Raises ValueError where parts leave any of these out, or have fewer blocks.
    """
    index = kv.index(blocks)
    missing = sum(each.run.layers * each.run.heads for each in runs)
    for part, array in zip(payload.parts, payload.arrays, strict=True):
        if not part.runs:  # of a rank whose layers keep states alone
            continue
        held_blocks, rest = divmod(array.nbytes, block_bytes(part))
        if rest or first + len(blocks) > held_blocks:
            raise ValueError(f"{array.nbytes} bytes do not hold blocks {first} to {first + len(blocks)} of {part}")
        missing -= _put(kv, runs, blocks, index, part, array, held_blocks, first)
    if missing:
        raise ValueError(f"parts {payload.parts} leave out {missing} heads of {[each.run for each in runs]}")


def _put(
    kv: KVCache,
    runs: Sequence[Held],
    blocks: list[int],
    index: Tensor,
    part: Part,
    array: np.ndarray,
    has: int,
    first: int,
) -> int:
    """The heads, of all layers, that ``part`` had; ``has``: blocks."""
    count = 0
    wanted = slice(first, first + len(blocks))
    for run, source in run_views(part, array, has):
        for mine in runs:
            common = _shared(mine.run, run)
            if common is None:
                continue
            layers, heads = common
            if (run.sides, run.width) != (mine.run.sides, mine.run.width):
                raise ValueError(f"{run} is of another model than {mine.run}")
            target = raw(kv.planes[mine.plane])
            found = torch.from_numpy(source[_within(layers, run.layer), :, wanted, _within(heads, run.head)])
            found = found.view(target.dtype).to(kv.device, non_blocking=True)
            place = _within(layers, mine.run.layer)
            place = slice(mine.at + place.start, mine.at + place.stop)
            write_blocks(target[place, :, :, _within(heads, mine.run.head)], blocks, index, found)
            count += len(layers) * len(heads)
    return count


def _shared(one: Run, other: Run) -> tuple[range, range] | None:
    """Layers and heads that both have."""
    layers = range(max(one.layer, other.layer), min(one.layer + one.layers, other.layer + other.layers))
    heads = range(max(one.head, other.head), min(one.head + one.heads, other.head + other.heads))
    return (layers, heads) if layers and heads else None


def _within(numbers: range, first: int) -> slice:
    return slice(numbers.start - first, numbers.stop - first)
