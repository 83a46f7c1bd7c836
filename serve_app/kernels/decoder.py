"""A standard decoder's whole forward pass as one C++ call on CPUs with bfloat16 dot products (AVX512_BF16).

:class:`DecoderBuilder` copies weights into one arena in the order in which a step reads them (huge pages where the
system gives them) and :class:`Decoder` runs batches. The records mirror ``cpu/model.h`` field by field.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.kernels.library import native
from serve_app.kernels.linear.packing import LinearLayout
from serve_app.kernels.linear.panels import LINEAR, PanelStore, panel_library, plain_order
from serve_app.kernels.linear.places import Places
from serve_app.kernels.linear.quantize import PANEL, Quantized
from serve_app.kernels.mixture import ABSENT, MixtureWeight, mixture_record
from serve_app.kernels.shapes import ShapeMismatch, check_batch, check_decoder, check_plane

PARTS = ("norms and embedding", "layer linears", "rotary and K/V write", "attention", "head")
_NORM, _LINEAR = "Pd", LINEAR
_LAYER = struct.Struct(_NORM + _LINEAR + 2 * _NORM + _LINEAR + _NORM + 2 * _LINEAR + "qddPP")
_MODEL = struct.Struct("PP" + _NORM + _LINEAR + "8q")
_STEP = struct.Struct("20P12q")
_REASONS = {
    2: "lengths or sample rows contradict each other",
    3: "a block id or slot is outside the cache",
    4: "a token id is outside the vocabulary",
    5: "a position is outside the rotary table",
    6: "a row names a place for adapters that there is not",
    9: "this build has no bfloat16 or 8-bit dot products",
}


@dataclass(slots=True, frozen=True)
class DecoderShape:
    """Sizes of a decoder: ``inner`` is the MLP's width (0 where every layer has experts), ``rotary_dim`` the part of a
    head that is rotated.
    """

    vocab: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int

    def obstacle(self) -> str | None:
        """Why the C++ pass can't take this shape, or None."""
        if self.hidden % 32 or self.inner % 32 or self.head_dim % 16 or self.rotary_dim % 32:
            return "hidden, inner and rotary sizes must be multiples of 32, heads of 16"
        if self.head_dim > native.MAX_HEAD_DIM or self.q_heads % self.kv_heads:
            return "head sizes do not fit the attention kernel"
        return None


@dataclass(slots=True)
class LinearWeight:
    """A linear layer's weight: ``parts`` [n_i, k] stacked, with their biases (all or none).

    ``quantized``, if there, are the same parts in fewer bits; ``parts`` then hold their values. ``names`` are those of
    the modules that the parts belong to.
    """

    parts: list[Tensor]
    biases: list[Tensor] = field(default_factory=list)
    quantized: list[Quantized] = field(default_factory=list)
    names: tuple[str, ...] = ()

    @property
    def out_features(self) -> int:
        return sum(len(p) for p in self.parts)

    @property
    def packed_rows(self) -> int:
        return -(-self.out_features // PANEL) * PANEL

    @property
    def packed_bytes(self) -> int:
        if self.quantized:
            return self.packed_rows * self.quantized[0].row_bytes
        return self.packed_rows * self.parts[0].shape[1] * 2


@dataclass(slots=True)
class NormWeight:
    """An RMS norm: ``weight`` [dim] of any float dtype and its epsilon."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class DecoderLayer:
    """One layer's weights. ``gate_up`` has exactly two parts; ``window`` 0 and ``softcap`` 0.0 mean none. A layer has
    ``gate_up`` and ``down``, or a ``mixture``. ``sinks`` [q_heads]: logits that take a share of the attention.
    """

    input_norm: NormWeight
    qkv: LinearWeight
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    o: LinearWeight
    post_norm: NormWeight
    gate_up: LinearWeight | None
    down: LinearWeight | None
    window: int
    scale: float
    softcap: float
    mixture: MixtureWeight | None = None
    sinks: Tensor | None = None

    def linears(self) -> list[LinearWeight]:
        """Those of its products, in their order; of a mixture none."""
        return [w for w in (self.qkv, self.o, self.gate_up, self.down) if w is not None]


def decoder_library(*, quantized: bool = False) -> native.Library | None:
    """The C++ library if this CPU can run the pass, and with ``quantized`` also on weights in fewer bits."""
    return panel_library(quantized=quantized)


def paired_order(inner: int) -> np.ndarray:
    """Each panel: 32 rows of the first part (gates), then the 32 of the second (ups) that belong to them."""
    half = PANEL // 2
    return np.arange(2 * inner, dtype=np.int64).reshape(2, inner // half, half).transpose(1, 0, 2).reshape(-1).copy()


def _places(layers: list[DecoderLayer], head: LinearWeight, places: int) -> Places:
    def layout(weight: LinearWeight, order: np.ndarray) -> LinearLayout:
        return LinearLayout(tuple(len(part) for part in weight.parts), weight.parts[0].shape[1], order)

    linears = []
    for layer in layers:
        for weight in layer.linears():
            paired = weight is layer.gate_up
            rows = weight.out_features
            linears.append(layout(weight, paired_order(rows // 2) if paired else plain_order(rows)))
    return Places([*linears, layout(head, plain_order(head.out_features))], places)


class Decoder:
    """A packed decoder. ``rotary(positions)`` gives cos and sin [positions, rotary_dim / 2] float32 for 0 and up,
    ``rotary_rows(axes)`` [T, rotary_dim / 2] for rows that ``batch.axes`` places.

    bfloat16 weights are packed into 12 bits, which changes no result, where that saves time (``compact`` None) or where
    told to. With ``places`` rows may have adapters, which are put into :attr:`adapters`: for each layer those of qkv,
    o, gate_up and down, then those of the head.
    """

    def __init__(
        self,
        library: native.Library,
        shape: DecoderShape,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: NormWeight,
        head: LinearWeight,
        rotary: Callable[[int], tuple[Tensor, Tensor]],
        *,
        compact: bool | None = None,
        places: int = 0,
        rotary_rows: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._library = library
        self._rotary, self._rotary_rows = rotary, rotary_rows
        self._positions = 0
        # int64 [5] nanoseconds per part of the pass (see PARTS), added up while this is set.
        self.times: np.ndarray | None = None
        # int64 [1] bytes of the experts that steps have read, added up while this is set.
        self.experts_read: np.ndarray | None = None
        check_decoder(shape, embedding, layers, final_norm, head)
        embedding = embedding.to(torch.bfloat16).contiguous()
        self._keep: list[Any] = [embedding]
        self._layers = len(layers)
        self._checked: Any = None  # the cache that was seen to have this decoder's shape
        self.shape = shape
        linears = [w for layer in layers for w in layer.linears()]
        linears += [w for layer in layers if layer.mixture is not None for w in layer.mixture.linears()]
        most = sum(w.packed_bytes for w in [*linears, head])
        self.plain_bytes = most
        self.expert_bytes = 0  # those of all experts, of `packed_bytes`
        self.adapters = _places(layers, head, places) if places else None
        self._store = PanelStore(library, most + 64 * (len(linears) + 1), compact=compact)
        table = b"".join(self._layer(layer) for layer in layers)
        record = _MODEL.pack(
            self._hold(table), embedding.data_ptr(), *self._norm(final_norm), *self._linear(head), len(layers),
            shape.vocab, shape.hidden, shape.inner, shape.q_heads, shape.kv_heads, shape.head_dim, shape.rotary_dim,
        )  # fmt: skip
        self._model = self._hold(record)

    @property
    def packed_bytes(self) -> int:
        """Bytes that a step with all rows reads; ``plain_bytes``: what they would be with every weight as it came."""
        return self._store.bytes

    @property
    def threads(self) -> int:
        return native.threads(self._library)

    def __call__(self, batch: Any) -> Tensor:
        """Logits [S, vocab] float32 of ``batch.sample_rows`` (``engine.step.Batch``, cache bfloat16).

        Fulfils ``batch.capture``. Raises ValueError when the batch contradicts itself or the cache.
        """
        if batch.max_seq_len > self._positions:
            self._extend_rotary(batch.max_seq_len)
        [plane] = batch.kv.planes
        if batch.kv is not self._checked:
            check_plane(plane, self._layers, self.shape)
            self._checked = batch.kv
        check_batch(batch)
        samples = batch.sample_rows.shape[0]
        logits = torch.empty((samples, self.shape.vocab), dtype=torch.float32)
        capture = batch.capture
        layers = np.array(capture.layers if capture is not None else (), np.int64)
        if capture is not None:
            states = (len(batch.input_ids), len(layers), self.shape.hidden)
            capture.states = torch.empty(states, dtype=torch.bfloat16)
        embedded, given = self._given(batch) if batch.embeddings is not None else (None, None)
        adapters = self.adapters if batch.adapters is not None else None
        positions, cos, sin, table = batch.positions, self._cos, self._sin, self._positions
        if batch.axes is not None and self._rotary_rows is not None:
            # A table of the batch's own, in which each row has its place.
            cos, sin = self._rotary_rows(batch.axes)
            table = len(positions)
            self._check_table(table, cos, sin)
            positions = torch.arange(table)
        code = self._library.decoder(
            _STEP.pack(
                self._model, plane.data_ptr(), batch.input_ids.data_ptr(), positions.data_ptr(),
                batch.slots.data_ptr(), batch.query_start.data_ptr(), batch.seq_lens.data_ptr(),
                batch.block_tables.data_ptr(), batch.sample_rows.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                logits.data_ptr(), 0 if self.times is None else self.times.ctypes.data,
                layers.ctypes.data, 0 if capture is None else capture.states.data_ptr(),
                0 if embedded is None else embedded.data_ptr(), 0 if given is None else given.data_ptr(),
                0 if adapters is None else batch.adapters.data_ptr(),
                0 if adapters is None else adapters.records.ctypes.data,
                0 if self.experts_read is None else self.experts_read.ctypes.data,
                plane.shape[2], batch.input_ids.shape[0], batch.seq_lens.shape[0],
                batch.block_tables.stride(0), samples, table, self.threads, len(layers),
                0 if given is None else given.shape[0],
                0 if adapters is None else adapters.places, 0 if adapters is None else adapters.lanes,
                0 if given is None else given.shape[1] // self.shape.hidden - 1,
            )
        )  # fmt: skip
        if code:
            raise ValueError(f"the decoder refused the batch: {_REASONS[code]}")
        return logits

    def _given(self, batch: Any) -> tuple[Tensor, Tensor]:
        """For each token the row of the given embeddings that takes its place, or -1, and these as bfloat16."""
        values = batch.embeddings.values.to(torch.bfloat16).contiguous()
        parts, rest = divmod(values.shape[1], self.shape.hidden)
        if rest or not 0 < parts <= self._layers:
            raise ValueError(
                f"embeddings of {values.shape[1]} for a model of {self.shape.hidden}; use its own encoder's"
            )
        which = torch.full((batch.input_ids.shape[0],), -1, dtype=torch.int64)
        which[batch.embeddings.rows] = torch.arange(len(values))
        return which, values

    def _extend_rotary(self, positions: int) -> None:
        self._positions = max(1024, 1 << (positions - 1).bit_length())
        self._cos, self._sin = self._rotary(self._positions)
        self._check_table(self._positions, self._cos, self._sin)

    def _check_table(self, rows: int, cos: Tensor, sin: Tensor) -> None:
        half = (rows, self.shape.rotary_dim // 2)
        if cos.shape != half or sin.shape != half:
            raise ShapeMismatch(f"the rotary table is {list(cos.shape)}, expected {list(half)}")

    def _hold(self, record: bytes) -> int:
        buffer = ctypes.create_string_buffer(record, len(record))
        self._keep.append(buffer)
        return ctypes.addressof(buffer)

    def _layer(self, layer: DecoderLayer) -> bytes:
        return _LAYER.pack(
            *self._norm(layer.input_norm),
            *self._linear(layer.qkv),
            *self._norm(layer.q_norm),
            *self._norm(layer.k_norm),
            *self._linear(layer.o),
            *self._norm(layer.post_norm),
            *(ABSENT if layer.gate_up is None else self._linear(layer.gate_up, paired=True)),
            *(ABSENT if layer.down is None else self._linear(layer.down)),
            layer.window,
            layer.scale,
            layer.softcap,
            0 if layer.mixture is None else self._hold(self._mixture(layer.mixture)),
            0 if layer.sinks is None else self._store.hold(layer.sinks.detach().float().contiguous()),
        )

    def _mixture(self, mixture: MixtureWeight) -> bytes:
        def pack(linear: LinearWeight, paired: bool) -> tuple[int, ...]:
            before = self._store.bytes
            record = self._linear(linear, paired)
            if linear is not mixture.router:
                self.expert_bytes += self._store.bytes - before
            return record

        return mixture_record(mixture, pack, self._hold)

    def _norm(self, norm: NormWeight | None) -> tuple[int, float]:
        if norm is None:
            return 0, 0.0
        weight = norm.weight.detach().float().contiguous()
        self._keep.append(weight)
        return weight.data_ptr(), norm.eps

    def _linear(self, weight: LinearWeight, paired: bool = False) -> tuple[int, ...]:
        rows = weight.out_features
        order = paired_order(rows // 2) if paired else plain_order(rows)
        bias = torch.cat([b.detach().float() for b in weight.biases]) if weight.biases else None
        if weight.quantized:
            return self._store.pack(Quantized.stack(weight.quantized), order, bias)
        source = weight.parts[0] if len(weight.parts) == 1 else torch.cat(weight.parts)
        return self._store.pack(source.detach().to(torch.bfloat16), order, bias)
