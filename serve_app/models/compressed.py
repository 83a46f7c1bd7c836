"""Entries that stand for several tokens: DeepSeek-V4's compressed attention (paper, section 2.3).

A layer attends to the last tokens of a window, and to *entries*, each made of a window of ``ratio`` tokens: a sum of
what each token gives, weighed by a softmax over the window. With a ratio of 128 queries see all entries; with 4 each
entry is made of two windows, its own and the one before, and an indexer, which makes entries of its own, chooses those
that a query sees. transformers keeps all of that in a cache of its own for one text (5.23); here it lies like this::

    tokens   0 ... 31 | 32 ... 63 | 64 ... 95 | 96 ... 127 | 128 ...
    blocks   8 entries of ratio 4 each; the entry of ratio 128 in the block where its window ends
    states   what the last rows have given, of which the next entry is made

Entries are a layer of the paged cache to themselves, so that they are shared and moved with the tokens they end with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.states import StatePart, StateShape
from serve_app.kernels.batch import BLOCK
from serve_app.kernels.chosen import Source, attend, gathered, rows_of, slots_of, window_source
from serve_app.models.attention import Carrier, PagedLayer
from serve_app.models.indexed import planned
from serve_app.models.stateful import keeps_state


@dataclass(slots=True)
class Stream:
    """One module that makes entries of ``width`` numbers, in windows of ``ratio`` tokens, which ``overlap`` the ones
    before them. ``place``: its layer of the cache; ``part``: of a slot of states.
    """

    module: Any
    ratio: int
    width: int
    overlap: bool
    dtype: torch.dtype
    place: PagedLayer | None = None
    part: int = 0

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return 2 * self.ratio if self.overlap else self.ratio

    @property
    def given(self) -> int:
        """Numbers of a token: what it gives, and how that is weighed."""
        return 2 * self.width * (2 if self.overlap else 1)

    @property
    def a_block(self) -> int:
        """Entries that end in a block, or for which it has room."""
        return max(1, BLOCK // self.ratio)

    @property
    def cached_width(self) -> int:
        """What a token of the cache takes, so that a block holds its entries."""
        return -(-self.a_block * self.width // BLOCK)

    def entries(self, kv: Any) -> Tensor:
        """All slots for entries, [blocks, a_block, 1, width]; writing to it writes to the cache."""
        assert self.place is not None
        layer = kv.layer(self.place.index)[0, :, 0]
        return layer.flatten(1)[:, : self.a_block * self.width].unflatten(1, (self.a_block, 1, self.width))

    def slots(self, tables: Tensor, request: Tensor, last: Tensor) -> Tensor:
        """Where entries lie whose windows end with the tokens ``last`` [n, K] of the texts of ``request`` [n]."""
        slots = slots_of(tables, request, last)
        return slots // BLOCK * self.a_block + slots % BLOCK // self.ratio % self.a_block

    def slots_by_number(self, tables: Tensor, request: Tensor, entries: Tensor) -> Tensor:
        """The same of entries by their numbers [n, K]."""
        return self.slots(tables, request, entries * self.ratio + self.ratio - 1)

    def take(self, rows: Tensor, batch: Any, request: Tensor, position: Tensor) -> None:
        """Rows [T, given] of a batch: makes the entries whose windows end with them, and keeps the last ones."""
        plane = batch.kv.states[self.part]
        for group in batch.states.rows:
            index = group.index
            own = rows[index] if index is not None else rows[group.begin : group.begin + group.count]
            own = own.view(-1, group.count, self.given)
            before = (
                own.new_zeros((len(own), self.span - 1, self.given))
                if group.reads is None
                else plane.index_select(0, group.reads).to(own.dtype)
            )
            whole = torch.cat([before, own], 1)
            first = index.view(-1, group.count)[:, 0] if index is not None else torch.tensor([group.begin])
            first = first.to(rows.device)
            self._close(whole, batch, request[first], position[first], group.count)
            plane.index_copy_(0, group.writes, whole[:, -(self.span - 1) :].to(plane.dtype))

    def _close(self, whole: Tensor, batch: Any, request: Tensor, position: Tensor, count: int) -> None:
        """``whole`` [texts, span - 1 + count, given], whose last ``count`` rows begin at ``position`` [texts]."""
        ratio, width, texts = self.ratio, self.width, len(whole)
        ends = (ratio - 1 - position % ratio)[:, None] + ratio * torch.arange(-(-count // ratio), device=whole.device)
        there = ends < count
        ends = ends.clamp_max(count - 1)
        of = ends[..., None] + torch.arange(self.span, device=whole.device)
        window = whole[torch.arange(texts, device=whole.device)[:, None, None], of]
        kv, gate = window.chunk(2, -1)
        bias = self.module.position_bias
        last = position[:, None] + ends
        if self.overlap:
            older, newer = slice(0, ratio), slice(ratio, None)
            gate = torch.cat(
                [gate[:, :, older, :width] + bias[:, :width], gate[:, :, newer, width:] + bias[:, width:]], 2
            )
            kv = torch.cat([kv[:, :, older, :width], kv[:, :, newer, width:]], 2)
            # Before the first window there is none.
            none = (last < self.span - 1)[:, :, None, None] & (torch.arange(self.span, device=kv.device) < ratio)[
                :, None
            ]
            gate, kv = gate.masked_fill(none, float("-inf")), kv.masked_fill(none, 0)
        else:
            gate = gate + bias
        made = self.module.kv_norm((kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2))
        made = self._turned(made.flatten(0, 1), (last - ratio + 1).flatten())
        # What is no entry goes to the block that belongs to nobody.
        slots = self.slots(batch.block_tables, request, last).masked_fill(~there, 0).flatten()
        entries = self.entries(batch.kv)
        if entries.dtype == torch.float8_e4m3fn:  # which has no infinity: what is too large would become NaN
            made = made.float().clamp(-448, 448)
        entries[slots // self.a_block, slots % self.a_block, 0] = made.to(entries.dtype)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Entries [n, width], or queries [n, heads, width], rotated to ``positions`` [n]."""
        module = self.module
        cos, sin = module.rotary_emb(x, position_ids=positions[None], layer_type=module.rope_layer_type)
        rotate = type(module).forward.__globals__["apply_rotary_pos_emb"]
        heads = x.ndim == 3
        out: Tensor = rotate(x.transpose(0, 1)[None] if heads else x[None, None], cos, sin)
        return out[0].transpose(0, 1) if heads else out[0, 0]


@dataclass(slots=True)
class CompressedLayer:
    """The compressor of one layer of attention, whose ``owner`` asks here what to attend to beside its window."""

    module: Any
    owner: Any
    stream: Stream
    index: Stream | None  # of the indexer, where there is one
    most: int  # entries that it chooses
    own: Callable[..., Any]
    names: tuple[str, ...]
    carrier: Carrier = field(default_factory=Carrier)
    chosen: Tensor | None = None  # [T, K] of the pass that is under way; None: all that are there
    shows: bool = False  # runs all of its linears, on texts for which it chooses nothing as well

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Makes and chooses entries; what it gives holds none, as attention finds them in the cache."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        hidden: Tensor = given["hidden_states"]
        batch = self.carrier.batch
        if batch is not None:
            request, position = self._places(batch)
            self._take(self.stream, hidden, batch, request, position)
            self.chosen = None
            if self.index is not None:
                self._take(self.index, hidden, batch, request, position)
                if self.shows:
                    self.index.module.q_b_proj(given["q_residual"])
                    self.index.module.scorer.weights_proj(hidden)
                if batch.max_seq_len // self.stream.ratio > self.most:
                    self.chosen = self._choose(given["q_residual"][0], hidden[0], batch, request, position)
        return hidden.new_zeros((1, 1, 0, self.stream.width)), None

    def _places(self, batch: Any) -> tuple[Tensor, Tensor]:
        """:func:`rows_of` the batch, worked out once for all layers of a pass."""
        if "rows" not in self.carrier.plans:
            self.carrier.plans["rows"] = rows_of(batch, len(batch.slots), batch.slots.device)
        found: tuple[Tensor, Tensor] = self.carrier.plans["rows"]
        return found

    @staticmethod
    def _take(stream: Stream, hidden: Tensor, batch: Any, request: Tensor, position: Tensor) -> None:
        rows = torch.cat([stream.module.kv_proj(hidden), stream.module.gate_proj(hidden)], -1)[0]
        stream.take(rows, batch, request, position)

    def _choose(self, queries: Tensor, hidden: Tensor, batch: Any, request: Tensor, position: Tensor) -> Tensor:
        """The best entries of each row, [T, most] int64; -1 for none."""
        index = self.index
        assert index is not None
        module, scorer = index.module, index.module.scorer
        q = module.q_b_proj(queries).view(len(queries), -1, index.width)
        q = index._turned(q, position)
        weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling  # [T, heads]
        found = torch.full((len(q), self.most), -1, dtype=torch.int64, device=q.device)
        every, row = torch.arange(self.most, device=q.device), torch.arange(len(q), device=q.device)
        table = index.entries(batch.kv)
        # Texts with no more entries than are chosen see all of theirs.
        most = (self.most + 1) * index.ratio - 1
        for piece in planned(self.carrier, batch, most, q.shape[1], index.width, together=True):
            rows = piece.rows
            at = row[rows.begin : rows.begin + rows.count] if rows.index is None else rows.index
            seen = (position[at] + 1) // index.ratio
            if not piece.chooses:
                found[at] = every.expand(len(at), -1).masked_fill(every >= seen[:, None], -1)
                continue
            entries = torch.arange(max(piece.lengths) // index.ratio, device=q.device)
            texts = torch.tensor(piece.requests, device=q.device)
            slots = index.slots_by_number(batch.block_tables, texts, entries.expand(len(texts), -1))
            keys = gathered(table, slots)[:, :, 0].to(q.dtype)  # [texts, entries, width]
            own = q[at].view(len(texts), rows.count, -1, index.width)
            scores = (
                torch.matmul(own.float(), keys.transpose(-1, -2).float().unsqueeze(1)).relu_() * scorer.softmax_scale
            )
            scores = (scores * weights[at].view(len(texts), rows.count, -1, 1)).sum(2).flatten(0, 1)
            scores = scores.masked_fill(entries >= seen[:, None], float("-inf"))
            best = scores.topk(min(self.most, len(entries)), -1).indices
            found[at, : best.shape[1]] = best.masked_fill(best >= seen[:, None], -1)
        return found

    def attend(
        self, q: Tensor, cache: Tensor, batch: Any, *, window: int, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Queries [T, Hq, D] over their windows and their entries."""
        request, position = self._places(batch)
        stream, chosen = self.stream, self.chosen
        self.chosen = None
        sources = [window_source(cache, batch, min(window, batch.max_seq_len), request, position)]
        count = batch.max_seq_len // stream.ratio if chosen is None else chosen.shape[1]
        if count:
            every = torch.arange(count, device=q.device)

            def pick(part: slice) -> tuple[Tensor, Tensor]:
                seen = (position[part, None] + 1) // stream.ratio
                entries = every.expand(len(seen), -1) if chosen is None else chosen[part]
                there = (entries >= 0) & (entries < seen)
                return stream.slots_by_number(batch.block_tables, request[part], entries.masked_fill(~there, 0)), there

            table = stream.entries(batch.kv)
            sources.append(Source(table, table, count, pick))
        return attend(q, sources, scale=scale, sinks=sinks)

    @property
    def streams(self) -> list[Stream]:
        """What it keeps."""
        return [self.stream] if self.index is None else [self.stream, self.index]


def wrap_compressed(module: nn.Module) -> list[CompressedLayer]:
    """Lets the compressors of a model find their entries in the batch; none for most models. Raises ValueError for
    entries that do not fit blocks.
    """
    layers: list[CompressedLayer] = []
    carrier = Carrier()
    for owner in list(module.modules()):
        child: Any = getattr(owner, "compressor", None)
        if not isinstance(child, nn.Module) or not keeps_state(child):
            continue
        names = tuple(inspect.signature(inspect.unwrap(type(child).forward)).parameters)[1:]
        indexer: Any = getattr(child, "indexer", None)
        index = None if indexer is None else _stream(indexer)
        most = 0 if indexer is None else int(indexer.index_topk)
        layer = CompressedLayer(child, owner, _stream(child), index, most, child.forward, names, carrier)
        child.forward = layer
        owner.beside = layer  # type: ignore[assignment]
        layers.append(layer)
    return layers


def compressed_layers(module: nn.Module) -> list[CompressedLayer]:
    """Those that :func:`wrap_compressed` has found."""
    return [child.forward for child in module.modules() if isinstance(child.forward, CompressedLayer)]


@contextmanager
def showing_linears(module: nn.Module) -> Iterator[None]:
    """For passes that look at which linears a model has."""
    layers = compressed_layers(module)
    for layer in layers:
        layer.shows = True
    try:
        yield
    finally:
        for layer in layers:
            layer.shows = False


def with_streams(shape: StateShape, layers: Sequence[CompressedLayer]) -> StateShape:
    """The states of a model's other layers, ``shape``, and behind them those of ``layers``, which learn where."""
    parts = list(shape.parts)
    for number, stream in enumerate(stream for layer in layers for stream in layer.streams):
        stream.part = len(parts)
        parts.append(StatePart(number, "conv", 0, (stream.span - 1, stream.given), stream.dtype))
    return StateShape(tuple(parts), shape.single)


def _stream(module: Any) -> Stream:
    """Raises ValueError for a ratio with which two entries would end in one place of a block."""
    width, ratio = int(module.head_dim), int(module.compress_rate)
    if ratio < BLOCK and BLOCK % ratio:
        raise ValueError(f"entries stand for {ratio} tokens each, which do not divide blocks of {BLOCK}")
    overlap = module.kv_proj.out_features == 2 * width
    return Stream(module, ratio, width, overlap, module.kv_proj.weight.dtype)
