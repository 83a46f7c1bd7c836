"""Pictures that some layers of a model attend to beside the text, as Llama 3.2 Vision's do.

Such a picture is one token of the prompt, and keys and values in each of these layers, which are computed once for the
picture and belong to no position. A token attends to the pictures of the last run of them up to itself. Those before
the first picture attend to all of the prompt's, padding included, as transformers has it::

    tokens    begin  user   <A>   <B>  What  are  they?  <C>  And  this?
    see       A B C  A B C  A     A B  A B   A B  A B    C    C    C

So all of a prompt's K/V depend on all of its pictures, and cache keys name them from the first block on. Requests
without pictures skip these layers, rows of others in the same batch do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.gpu.staging import to_device

if TYPE_CHECKING:
    from serve_app.engine.request import EmbeddedSpan
    from serve_app.engine.step import Scheduled


@dataclass(slots=True)
class Beside:
    """One picture: ``states`` [layers, 2, Hkv, places, D], keys and values, of which the first ``used`` are the
    picture's and the others padding."""

    states: Tensor
    used: int


@dataclass(slots=True)
class _Part:
    """Consecutive rows that see the same: of each of ``pictures`` so many of its places."""

    count: int
    pictures: list[tuple[Beside, int]]

    def keys_values(self, layer: int) -> Tensor:
        """[2, Hkv, places, D]."""
        own = [picture.states[layer, :, :, :places] for picture, places in self.pictures]
        return own[0] if len(own) == 1 else torch.cat(own, 2)


@dataclass(slots=True)
class Crossing:
    """``rows`` [E] int64: of the batch, those of requests with pictures; ``behind`` [1, 1, E, 1]: 1 where a picture
    stands before a row or is it, else 0. Both on the batch's device."""

    rows: Tensor
    behind: Tensor
    parts: list[_Part]

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """``q`` [E, Hq, D] of the rows to what they see in the ``layer``-th of these layers, [E, Hq, D]."""
        found = []
        for part, own in zip(self.parts, q.split([part.count for part in self.parts]), strict=True):
            keys, values = part.keys_values(layer)[:, None]
            out = F.scaled_dot_product_attention(own.transpose(0, 1)[None], keys, values, scale=scale, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)


def cross(scheduled: Sequence[Scheduled], query_start: np.ndarray, device: torch.device) -> Crossing | None:
    """The pictures of a batch; None where there are none of this kind."""
    rows, behind, parts = [], [], []
    for begin, s in zip(query_start.tolist(), scheduled, strict=False):
        spans = [span for span in s.embedded if span.beside is not None]
        if not spans:
            continue
        rows.append(np.arange(begin, begin + s.count))
        behind.append(np.arange(s.start, s.start + s.count) >= spans[0].start)
        parts += _parts(spans, s.start, s.start + s.count)
    if not rows:
        return None
    numbers, seen = to_device([np.concatenate(rows), np.concatenate(behind).astype(np.float32)], device)
    return Crossing(numbers, seen[None, None, :, None], parts)


def _parts(spans: Sequence[EmbeddedSpan], start: int, end: int) -> list[_Part]:
    """Tokens [start, end) of a request, cut where what they see changes."""
    pictures = [span.beside() for span in spans if span.beside is not None]
    borders = [0, *(span.start for span in spans), end]
    found, first = [], 0
    for number, (begin, behind) in enumerate(zip(borders, borders[1:], strict=False)):
        if number == 0:
            seen = [(picture, picture.states.shape[3]) for picture in pictures]
        else:
            if number > 1 and spans[number - 1].start != spans[number - 2].end:
                first = number - 1
            seen = [(picture, picture.used) for picture in pictures[first:number]]
        count = min(behind, end) - max(begin, start)
        if count > 0:
            found.append(_Part(count, seen))
    return found
