"""Token sequences of many callers through an encoder: a step is one flat batch of up to so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from serve_app.engine.batching import Batcher, Call, Picked
from serve_app.engine.encoder.types import EncodeBatch, EncodeError, Encoder, Ids, Readout, SequenceTooLong


class EncodeBatcher(Batcher):
    """Runs an :class:`Encoder`.

    ``token_budget`` is the tokens of a step; a model that pads bounds its padding itself (see ``padded_tokens``). On
    CPUs a step's activations should stay in the cache, hence the modest default.
    """

    def __init__(self, model: Encoder, *, token_budget: int = 1024, name: str = "encoder") -> None:
        self.model = model
        super().__init__(budget=token_budget, name=name)

    def submit(
        self,
        sequences: Sequence[Ids],
        readout: Readout | None = None,
        *,
        type_ids: Sequence[Ids] | None = None,
        batch: bool = False,
    ) -> Future[Any]:
        """Queues token id sequences (special tokens included), each [n] int32; ``type_ids`` are the segments
        of pairs. ``batch``: it takes what other calls leave.

        The future gives [n, d] float32 vectors or [n] scores in the order of ``sequences``, with token heads a
        list of n rows (see :class:`Readout`). Cancelling it frees the queue. Raises :class:`SequenceTooLong`,
        :class:`EncodeError` for other unusable input, :class:`EncoderClosed`.
        """
        readout = readout or self.model.readout
        self._check(sequences, type_ids, readout)
        kinds = type_ids if type_ids is not None else [None] * len(sequences)
        items = list(zip(sequences, kinds, strict=True))
        return self.enqueue(Call(items, [len(s) for s in sequences], readout, batch=batch))

    def step(self, picked: Picked) -> tuple[Sequence[Any], int]:
        batch = _build(picked)
        rows: Any = self.model.forward(batch)
        return rows, self.model.padded_tokens(batch.lengths)

    def keep(self, call: Call, index: int, result: Any) -> None:
        if call.results is None:
            count = len(call.items)
            call.results = [result] * count if call.asked.heads else np.empty((count, len(result)), np.float32)
        call.results[index] = result

    def finish(self, call: Call) -> Any:
        readout: Readout = call.asked
        if not call.items:
            return readout.finish(np.zeros((0, self.model.dimensions), np.float32))
        if readout.heads:
            return readout.finish_long(call.results, self.model.dimensions)
        return readout.finish(call.results)

    def _check(self, sequences: Sequence[Ids], type_ids: Sequence[Ids] | None, readout: Readout) -> None:
        model = self.model
        if (readout.pooling == "score") != (model.readout.pooling == "score"):
            usual = model.readout.pooling
            raise EncodeError(f"this model does not give {readout.pooling!r}; its readout is {usual!r}")
        if reason := model.lacks(readout.heads) if readout.heads else "":
            raise EncodeError(reason)
        if readout.dimensions is not None and not 1 <= readout.dimensions <= model.dimensions:
            raise EncodeError(f"dimensions is {readout.dimensions}; this model takes 1 to {model.dimensions}")
        for i, ids in enumerate(sequences):
            _check_ids(ids, i, "token ids", model.vocab_size)
            if len(ids) > model.max_length:
                raise SequenceTooLong(i, len(ids), model.max_length)
        if type_ids is None:
            return
        if len(type_ids) != len(sequences):
            raise EncodeError(f"{len(type_ids)} type_ids for {len(sequences)} sequences; give one each")
        for i, (ids, kinds) in enumerate(zip(sequences, type_ids, strict=True)):
            _check_ids(kinds, i, "type_ids", max(model.type_vocab_size, 1))
            if len(kinds) != len(ids):
                raise EncodeError(f"input {i} has {len(ids)} tokens but {len(kinds)} type_ids")


def _check_ids(ids: Ids, index: int, what: str, size: int) -> None:
    if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids):
        got = f"{ids.dtype} {ids.shape}"
        raise EncodeError(f"{what} of input {index} must be a non-empty 1-D int32 array; got {got}")
    if ids.min() < 0 or ids.max() >= size:
        raise EncodeError(f"{what} of input {index} must lie in 0 to {size - 1}; is the tokenizer the model's?")


def _build(picked: Picked) -> EncodeBatch:
    items = [call.items[i] for call, i in picked]
    readouts = [call.asked for call, _ in picked]
    sequences = [ids for ids, _ in items]
    kinds = [np.zeros(len(ids), np.int32) if types is None else types for ids, types in items]
    return EncodeBatch(
        ids=np.concatenate(sequences),
        type_ids=np.concatenate(kinds),
        lengths=np.array([len(s) for s in sequences], np.int64),
        pooling=[readout.pooling for readout in readouts],
        heads=[readout.heads for readout in readouts] if any(readout.heads for readout in readouts) else [],
    )
