"""Indexers, which choose the keys that a query attends to: DeepSeek sparse attention and what has come of it.

An indexer (DeepSeek-V3.2-Exp, section 2.1) keeps a small key of each token, scores all of a text's for each query, and
gives the best ``index_topk`` to attention; other layers may take over what the last one has chosen (GLM 5). The module
stays transformers' own. Its keys lie in a layer of the paged cache to themselves, behind those of attention, so that
they are shared, moved and handed over as keys and values are. It is called with the rows of one text, or with a row of
each of several, and with a cache (:class:`TextKeys`) that has just those texts' keys: transformers' interface for it is
``Cache.update_indexer`` (5.23).

::

    batch    | text 0: 3 rows, 40 keys | text 1: 1 row, 3,000 keys | text 2: 1 row, 5,000 |        index_topk 2,048
             | shorter than that: all  | one call, [2 texts, 1 row] over [2, 5,000] keys   |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.states import Rows
from serve_app.kernels.attention import write_kv
from serve_app.kernels.batch import BLOCK
from serve_app.models.attention import Carrier
from serve_app.models.linears import Current
from serve_app.models.stateful import rows_given, within

# Bytes of scores, float32, that one call computes at most: [texts, rows, heads, keys].
SCORES = 128 << 20
_CACHE = "past_key_values"


class AnyMask(dict[str, Tensor]):
    """What stands for a model's attention masks, by kind of layer: nobody here reads any."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def __missing__(self, kind: str) -> Tensor:
        return self._mask


class _Enough(Exception):
    """The indexer's keys are kept, and nothing is to be chosen."""


@dataclass(slots=True)
class TextKeys:
    """The keys of some texts, as their indexer sees them: transformers' cache without the rest. ``table`` [texts,
    blocks]; ``slots`` [texts * rows] where the rows' own keys belong; ``longest``: tokens of the longest text.
    """

    layer: Tensor | None  # of the cache, [1, blocks, 1, 32, D]; None while a model is looked at
    slots: Tensor | None = None
    table: Tensor | None = None
    longest: int = 0
    chooses: bool = True
    width: int = 0

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Keeps [texts, rows, D]; returns all keys of these texts, [texts, longest, D]. What lies behind a shorter
        text's end is no key of it.
        """
        self.width = indexer_key_states.shape[-1]
        if self.layer is None or self.table is None or self.slots is None:
            self.longest = indexer_key_states.shape[1]
            return indexer_key_states
        rows = indexer_key_states.reshape(-1, 1, self.width)
        write_kv(self.layer, rows, rows, self.slots)
        if not self.chooses:
            raise _Enough
        texts = len(self.table)
        keys = self.layer[0, :, 0]
        if keys.dtype == torch.float8_e4m3fn:  # of which torch gathers none
            found = keys.view(torch.uint8).index_select(0, self.table.flatten()).view(keys.dtype)
        else:
            found = keys.index_select(0, self.table.flatten())
        return found.view(texts, -1, self.width)[:, : self.longest].to(indexer_key_states.dtype)

    # What GLM 5.3 Flash asks of the layers of its cache.

    @property
    def layers(self) -> TextKeys:
        return self

    def __getitem__(self, index: int) -> TextKeys:
        return self

    @property
    def keys(self) -> Tensor:
        return torch.empty((1, self.longest, 0))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the texts with their rows."""
        return self.longest


@dataclass(slots=True)
class Piece:
    """Rows that go through an indexer together. ``lengths`` of their texts with these rows; ``chooses``: whether these
    have more tokens than are chosen."""

    rows: Rows
    requests: list[int]
    lengths: list[int]
    chooses: bool


@dataclass(slots=True)
class IndexedLayer:
    """One indexer. ``most``: tokens that it chooses, so that shorter texts have all of theirs. ``pooled``: it scores
    pools of tokens (GLM 5.3 Flash), and is told of no texts of different lengths at once.
    """

    module: Any
    own: Callable[..., Tensor]
    names: tuple[str, ...]
    most: int
    heads: int
    pooled: bool
    seen: int = 0  # width of its keys
    # Where linears within it look for the batch.
    current: Current | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.names}
        hidden: Tensor = given["hidden_states"]
        batch = self.module.paged_layer.carrier.batch if hasattr(self.module, "paged_layer") else None
        if batch is None:
            return self._look(given, hidden)
        rows = hidden.shape[1]
        pieces = planned(self.module.paged_layer.carrier, batch, self.most, self.heads, self.seen, not self.pooled)
        if len(pieces) == 1 and not pieces[0].chooses:
            self._call(batch, pieces[0], given, rows)
            return torch.empty((1, rows, 0), dtype=torch.int32, device=hidden.device)
        found = [(piece, self._call(batch, piece, given, rows)) for piece in pieces]
        width = max(out.shape[-1] for _, out in found if out is not None)
        chosen = torch.full((1, rows, width), -1, dtype=torch.int32, device=hidden.device)
        every = torch.arange(width, dtype=torch.int32, device=hidden.device)
        for piece, out in found:
            index, begin = piece.rows.index, piece.rows.begin
            if out is None:
                assert index is not None
                chosen[0, index] = every  # what lies behind a query, attention leaves out
            elif index is not None:
                chosen[0, index, : out.shape[-1]] = out.flatten(0, 1)
            else:
                chosen[0, begin : begin + piece.rows.count, : out.shape[-1]] = out[0]
        return chosen

    def _look(self, given: dict[str, Any], hidden: Tensor) -> Tensor:
        """A pass over one short text, which shows how wide its keys are."""
        keys, tokens = TextKeys(None), hidden.shape[1]
        out = self.own(**given | {_CACHE: keys, "attention_mask": self._mask([tokens], tokens, hidden.device)})
        self.seen = keys.width
        return out

    def _call(self, batch: Any, piece: Piece, given: dict[str, Any], total: int) -> Tensor | None:
        """The module on a piece: [texts, rows, chosen], or None where all are."""
        rows, device = piece.rows, batch.slots.device
        longest = max(piece.lengths)
        index = rows.index
        slots = batch.slots[index] if index is not None else batch.slots[rows.begin : rows.begin + rows.count]
        table = batch.block_tables
        if piece.chooses:
            of = torch.tensor(piece.requests, device=device)
            table = table.index_select(0, of)[:, : -(-longest // BLOCK)]
        layer = batch.kv.layer(self.module.paged_layer.index)
        keys = TextKeys(layer, slots, table, longest, piece.chooses)
        asked = {name: rows_given(value, total, rows) for name, value in given.items() if name != "attention_mask"}
        # One that scores pools asks which rows there are, also of texts that have all of them chosen.
        masked = piece.chooses or self.pooled
        asked |= {_CACHE: keys, "attention_mask": self._mask(piece.lengths, rows.count, device) if masked else None}
        try:
            with within(self.current, batch, rows):
                return self.own(**asked)
        except _Enough:
            return None

    def _mask(self, lengths: list[int], rows: int, device: torch.device) -> Tensor:
        """Which keys rows may choose, [texts, rows, keys]; of pools, which rows there are."""
        if self.pooled:
            return torch.ones((len(lengths), rows), dtype=torch.bool, device=device)
        key = torch.arange(max(lengths), device=device)
        last = torch.tensor(lengths, device=device)[:, None] - rows + torch.arange(rows, device=device)
        return key <= last[:, :, None]


def planned(carrier: Carrier, batch: Any, most: int, heads: int, width: int, together: bool) -> list[Piece]:
    """:func:`cut`, worked out once for all layers of a pass. ``width``: of keys."""
    key = most, heads, width, together
    if key not in carrier.plans:
        carrier.plans[key] = list(cut(batch, most, heads, max(heads, width), together=together))
    found: list[Piece] = carrier.plans[key]
    return found


def cut(batch: Any, most: int, heads: int, each: int, *, together: bool = True) -> Iterator[Piece]:
    """The pieces of a batch: texts of up to ``most`` tokens, which have all of them chosen, together; some rows of one
    longer text; or, if they may go ``together``, a row of each of several. ``heads``: scores of a row and a key;
    ``each``: numbers of a key, or its scores with one row, whichever are more.
    """
    device = batch.slots.device
    if batch.max_seq_len <= most:
        yield Piece(_rows(0, len(batch.slots)), [0], [batch.max_seq_len], False)
        return
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    short = [row for r, n in enumerate(lengths) if n <= most for row in range(starts[r], starts[r + 1])]
    if short:
        yield Piece(_rows(0, len(short), torch.tensor(short, device=device)), [0], [most], False)
    single: list[int] = []
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if length <= most or first == last:
            continue
        if last - first == 1 and together:
            single.append(request)
            continue
        step = max(1, SCORES // (4 * heads * length))
        for begin in range(first, last, step):
            end = min(last, begin + step)
            yield Piece(_rows(begin, end - begin), [request], [length - (last - end)], True)
    single.sort(key=lambda request: -lengths[request])
    while single:
        longest = lengths[single[0]]
        count = max(1, SCORES // (4 * each * longest))
        some, single = single[:count], single[count:]
        index = torch.tensor([starts[request] for request in some], device=device)
        yield Piece(_rows(0, 1, index), some, [lengths[request] for request in some], True)


def _rows(begin: int, count: int, index: Tensor | None = None) -> Rows:
    return Rows(begin, count, None, torch.empty(0), index)


def wrap_indexed(module: nn.Module) -> list[IndexedLayer]:
    """Lets the indexers of a model find their keys in the batch; none for most models. Raises ValueError for one that
    chooses no tokens of short texts.
    """
    layers: list[IndexedLayer] = []
    for child in list(module.modules()):
        if not is_indexer(type(child)):
            continue
        names = tuple(inspect.signature(inspect.unwrap(type(child).forward)).parameters)[1:]
        owner: Any = child
        known = hasattr(child, "index_topk") and hasattr(child, "n_heads")
        if not known or not {"hidden_states", _CACHE, "attention_mask"} <= set(names):
            continue  # refused by name
        pooled = hasattr(child, "index_kpool")
        if pooled and not owner.index_kpool_always_select_tail:
            raise ValueError("tokens behind the last whole pool are left out (index_kpool_always_select_tail: false)")
        layer = IndexedLayer(child, child.forward, names, int(owner.index_topk), int(owner.n_heads), pooled)
        owner.forward = layer
        layers.append(layer)
    if layers:
        for child in module.modules():
            if hasattr(child, "build_attention_mask_from_topk"):
                owner = child
                owner.build_attention_mask_from_topk = _as_chosen
    return layers


def indexed_layers(module: nn.Module) -> list[IndexedLayer]:
    """Those that :func:`wrap_indexed` has found."""
    return [child.forward for child in module.modules() if isinstance(child.forward, IndexedLayer)]


def is_indexer(kind: type) -> bool:
    """Whether modules of this class keep keys of their own by which they choose others'."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and "update_indexer" in code.co_names and "hidden_states" in code.co_varnames


def _as_chosen(topk_indices: Tensor, **_: Any) -> Tensor:
    """In the place of a mask."""
    return topk_indices
