"""Layers that keep a state of the whole text: recurrences (Mamba, gated delta nets) and short convolutions.

Their modules stay transformers' own. Each is called with the rows of one text, or with one row of each of several, and
with a cache that holds the states of just those: transformers' interface for them (``cache_utils.LinearAttentionLayer``
and its use in ``modeling_*.py``, 5.23) takes texts that go on behind a state with any number of tokens. What a module
keeps is seen in one short pass, as the sizes of keys and values are (:mod:`serve_app.models.loading.observe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.states import BatchStates, Rows, StatePart, StateShape
from serve_app.models.attention import Carrier
from serve_app.models.linears import Current

# Calls by which a module shows that it keeps a state, and the arguments by which it gets the cache.
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHES = ("cache_params", "past_key_values")
# By which one shows that it keeps what it makes entries of (serve_app.models.compressed).
_COMPRESSES = "store_compression_weights"
_MASKS = ("attention_mask", "conv_mask", "mask", "padding_mask")


class TextStates:
    """The states of one layer of some texts, as its module sees them: transformers' cache without a text's tokens.

    ``conv`` and ``recurrent`` hold them by number, [texts, *size]; empty before the first token.
    """

    def __init__(self, conv: dict[int, Tensor] | None = None, recurrent: dict[int, Tensor] | None = None) -> None:
        self.conv = conv or {}
        self.recurrent = recurrent or {}
        self._begun = bool(conv or recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether the module is to leave what it would forget."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, which the module may overwrite."""
        return self.conv.get(state_idx) if self._begun else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrence has come to, which the module may overwrite."""
        return self.recurrent.get(state_idx) if self._begun else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keeps the last ``conv_kernel_size`` of ``conv_states`` [..., tokens]; returns those before and these."""
        before = self.conv.get(state_idx)
        kept = int(before.shape[-1]) if before is not None else conv_kernel_size or int(conv_states.shape[-1])
        if before is not None:
            whole = torch.cat([before, conv_states], -1)
        else:
            whole = F.pad(conv_states, (max(0, kept - conv_states.shape[-1]), 0))
        self.conv[state_idx] = whole[..., -kept:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keeps ``recurrent_states``."""
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


@dataclass(slots=True)
class StatefulLayer:
    """One module with a state. ``parts``: where its tensors are among those of a slot, by kind and number."""

    module: Any
    own: Callable[..., Any]
    names: tuple[str, ...]
    cache: str
    carrier: Carrier
    # Takes one token at a time behind a state, as Mamba's first recurrence does.
    single: bool = False
    # Computes one token otherwise than several, so that those of an answer are computed as `generate` has them.
    stepwise: bool = False
    # Where linears within it look for the batch.
    current: Current | None = None
    seen: TextStates | None = None
    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    shape: StateShape = field(default_factory=StateShape)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get("batch", self.carrier.batch)
        given = dict(zip(self.names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.names}
        given |= {name: None for name in _MASKS if name in self.names}
        if batch is None:
            return self.own(**given | {self.cache: self.seen})
        rows = len(batch.input_ids)
        states: BatchStates = batch.states
        if len(states.rows) == 1 and states.rows[0].index is None:
            return self._texts(batch, states.rows[0], given)
        found: Any = None
        for part in states.rows:
            with within(self.current, batch, part):
                out = self._texts(batch, part, {name: rows_given(value, rows, part) for name, value in given.items()})
            found = _put(found, out, rows, part)
        return found

    def _token(self, batch: Any, rows: Rows, at: int, given: dict[str, Any]) -> Any:
        """The module on one of the ``rows`` of each text."""
        index = None if rows.index is None else rows.index.view(-1, rows.count)[:, at]
        with within(self.current, batch, Rows(rows.begin + at, 1, None, rows.writes, index)):
            return self.own(**{name: _token(value, rows, at) for name, value in given.items()})

    def _texts(self, batch: Any, rows: Rows, given: dict[str, Any]) -> Any:
        """The module on the ``rows`` that ``given`` has, with their states."""
        planes = batch.kv.states
        held = TextStates()
        if rows.reads is not None:
            by_kind: dict[str, dict[int, Tensor]] = {"conv": {}, "recurrent": {}}
            for (kind, number), index in self.parts.items():
                by_kind[kind][number] = planes[index].index_select(0, rows.reads)
            held = TextStates(**by_kind)
        singly = self.single or (self.stepwise and rows.generated)
        if singly and rows.reads is not None and rows.count > 1:
            out: Any = torch.cat(
                [self._token(batch, rows, at, given | {self.cache: held}) for at in range(rows.count)], 1
            )
        else:
            out = self.own(**given | {self.cache: held})
        for (kind, number), index in self.parts.items():
            plane = planes[index]
            plane.index_copy_(0, rows.writes, getattr(held, kind)[number].to(plane.dtype))
        return out


def within(current: Current | None, batch: Any, rows: Rows) -> AbstractContextManager[None]:
    """Has linears get the ``rows`` of ``batch`` alone."""
    if current is None:
        return nullcontext()
    index = rows.index if rows.index is not None else slice(rows.begin, rows.begin + rows.count)
    return current.within(batch, index)


def rows_given(value: Any, total: int, rows: Rows) -> Any:
    """Of a tensor [1, total, ...] the rows [texts, count, ...], and the same of several; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(rows_given(each, total, rows) for each in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, total):
        return value
    if rows.index is not None:
        return value[0].index_select(0, rows.index).unflatten(0, (-1, rows.count))
    return value[:, rows.begin : rows.begin + rows.count]


def _token(value: Any, rows: Rows, at: int) -> Any:
    """Of the ``rows`` of each text one, [texts, 1, ...]."""
    if isinstance(value, tuple):
        return tuple(_token(each, rows, at) for each in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (len(rows.writes), rows.count):
        return value
    return value[:, at : at + 1]


def _put(found: Any, out: Any, total: int, rows: Rows) -> Any:
    """``out`` of some rows among those of all, ``found``, or the first."""
    if isinstance(out, tuple):
        return tuple(_put(None if found is None else found[i], each, total, rows) for i, each in enumerate(out))
    if not isinstance(out, Tensor):
        return out
    if found is None:
        found = out.new_empty((1, total, *out.shape[2:]))
    if rows.index is not None:
        found[0].index_copy_(0, rows.index, out.flatten(0, 1))
    else:
        found[:, rows.begin : rows.begin + rows.count] = out
    return found


def stateful_layers(module: nn.Module) -> list[StatefulLayer]:
    """Those that :func:`wrap_stateful` has found."""
    return [child.forward for child in module.modules() if isinstance(child.forward, StatefulLayer)]


def wrap_stateful(module: nn.Module) -> list[StatefulLayer]:
    """Lets the modules of a model that keep states find theirs in the batch; none for most models."""
    carrier, layers = Carrier(), []
    for child in module.modules():
        if not _updates(type(child)):
            continue
        forward = inspect.unwrap(type(child).forward)
        code = forward.__code__
        names = tuple(n for n, p in inspect.signature(forward).parameters.items() if p.kind is not p.VAR_KEYWORD)[1:]
        cache = next((name for name in _CACHES if name in names), None)
        if cache is None:
            continue
        single = any("scan" in name for name in code.co_names) and not _continues(code)
        # transformers keeps steps of time from becoming too short where it computes several of them, and only there.
        least, *_ = getattr(child, "time_step_limit", (0.0,))
        layer = StatefulLayer(child, child.forward, names, cache, carrier, single, least > 0)
        child.forward = layer
        layers.append(layer)
    return layers


def keeps_state(module: nn.Module) -> bool:
    """Whether this very module keeps a state."""
    return _keeps(type(module))


def keeps_states(model_class: type) -> bool:
    """Whether any layer of this class of models keeps a state."""
    found = vars(inspect.getmodule(model_class)).values()
    return any(isinstance(each, type) and issubclass(each, nn.Module) and _keeps(each) for each in found)


def _updates(kind: type) -> bool:
    return bool(_UPDATES & _calls(kind))


def _keeps(kind: type) -> bool:
    return bool({*_UPDATES, _COMPRESSES} & _calls(kind))


def _calls(kind: type) -> set[str]:
    """Names that a module's forward uses."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return set() if code is None else set(code.co_names)


def _continues(code: Any) -> bool:
    """Whether a module hands the state before some tokens to the recurrence over them."""
    keywords = {name for each in code.co_consts if isinstance(each, tuple) for name in each if isinstance(name, str)}
    return bool(keywords & {"initial_state", "initial_states"})


@contextmanager
def showing(layers: list[StatefulLayer]) -> Iterator[None]:
    """For a pass over one text, in which each layer shows what it keeps."""
    shown = [TextStates() for _ in layers]
    for layer, seen in zip(layers, shown, strict=True):
        layer.seen = seen
    try:
        yield
    finally:
        for layer in layers:
            layer.seen = None
    places: list[StatePart] = []
    for number, (layer, seen) in enumerate(zip(layers, shown, strict=True)):
        layer.parts = {}
        for kind, tensors in (("conv", seen.conv), ("recurrent", seen.recurrent)):
            for index, tensor in sorted(tensors.items()):
                layer.parts[kind, index] = len(places)
                places.append(StatePart(number, kind, index, tuple(tensor.shape[1:]), tensor.dtype))
    for layer in layers:
        layer.shape = StateShape(tuple(places), any(layer.single for layer in layers))


def shape_of(layers: list[StatefulLayer]) -> StateShape:
    """What all of a model's layers have shown that they keep of a text."""
    return layers[0].shape if layers else StateShape()
