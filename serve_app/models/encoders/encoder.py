"""An embedder or a reranker as a forward function over flat batches; `encoder_load` makes one of a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from serve_app.engine.encoder.types import EncodeBatch, Pooling, Readout, Rows, TokenHead
from serve_app.kernels.linear.fused import tail_rows
from serve_app.models.encoders import encoder_attention
from serve_app.models.encoders.pooling import pool
from serve_app.models.encoders.scores import base_of, classify, scored_last
from serve_app.models.encoders.token_heads import TokenHeads

Task = Literal["embeddings", "reranker"]

# In the padded path a run of sequences is cut where padding would pass this share of its positions.
MAX_PADDING = 0.2


@dataclass(slots=True)
class EncoderModel:
    """A loaded encoder. ``flat`` says whether sequences run concatenated without padding (checked at load)
    or padded.

    ``max_length`` counts tokens with special tokens; ``dimensions`` is the width of a vector before cutting.
    """

    module: Any  # a transformers PreTrainedModel
    task: Task
    flat: bool
    readout: Readout
    dimensions: int
    max_length: int
    vocab_size: int
    type_vocab_size: int
    first_position: int
    pad_id: int
    device: torch.device
    heads: TokenHeads = field(default_factory=TokenHeads)
    # Layers behind the pooling; the text's length from which on all its positions are rotated otherwise; the share of
    # padding that leaves other sequences as they are.
    dense: tuple[nn.Module, ...] = ()
    extend_at: int | None = None
    padding: float = MAX_PADDING
    report: dict[str, Any] = field(default_factory=dict)

    @torch.inference_mode()
    def forward(self, batch: EncodeBatch) -> Rows | list[Rows]:
        """Pooled rows [R, dimensions] float32, neither cut nor normalised; for a reranker logits [R, 1]. With heads in
        the batch R rows that go on with what the heads say."""
        found = self._run_flat(batch) if self.flat else self._run_padded(batch)
        if isinstance(found, list):
            return [row.float().cpu().numpy() for row in found]
        return found.float().cpu().numpy()

    def lacks(self, heads: tuple[TokenHead, ...]) -> str:
        """Why the model cannot give all of ``heads``; empty if it can."""
        for head in heads:
            if head not in self.heads.linears:
                reason = self.heads.refused.get(head, "its checkpoint has no such head")
                return f"this model does not give {head} output: {reason}"
        return ""

    def padded_tokens(self, lengths: npt.NDArray[np.int64]) -> int:
        """Token positions a pass over ``lengths`` (ascending) computes."""
        if self.flat:
            return int(lengths.sum()) + self._tail(int(lengths.sum()))
        return sum((end - start) * int(lengths[end - 1]) for start, end in _padding_runs(lengths, self.padding))

    def _tail(self, tokens: int) -> int:
        """Positions behind a flat batch that nobody reads."""
        return tail_rows(tokens) if self.device.type == "cpu" else 0

    def _run_flat(self, batch: EncodeBatch) -> Tensor | list[Tensor]:
        lengths = batch.lengths.tolist()
        starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
        tokens = len(batch.ids)
        tail = self._tail(tokens)
        positions = self.coded(
            np.arange(tokens, dtype=np.int64) - starts + self.first_position, np.repeat(batch.lengths, batch.lengths)
        )
        inputs = {
            "input_ids": self.tensor(np.pad(batch.ids, (0, tail))).unsqueeze(0),
            "position_ids": self.tensor(np.pad(positions, (0, tail), constant_values=self.first_position)).unsqueeze(0),
            "use_cache": False,
            "runs": encoder_attention.length_runs(lengths),
        }
        if self.type_vocab_size:
            inputs["token_type_ids"] = self.tensor(np.pad(batch.type_ids, (0, tail))).unsqueeze(0)
        hidden = base_of(self.module)(**inputs).last_hidden_state[0][:tokens]
        sizes = self.tensor(batch.lengths)
        if self.task == "embeddings":
            return self._read(hidden, sizes, batch.pooling, batch.heads)
        return classify(self.module, hidden, sizes)

    def coded(self, positions: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Position ids for tokens of sequences of ``lengths`` (see :mod:`serve_app.models.longrope`)."""
        return positions if self.extend_at is None else positions * 2 + (lengths > self.extend_at)

    def _read(
        self, hidden: Tensor, sizes: Tensor, pooling: list[Pooling], heads: list[tuple[TokenHead, ...]]
    ) -> Tensor | list[Tensor]:
        """Hidden states [T, H] of sequences of ``sizes`` tokens -> their rows."""
        pooled = pool(hidden, sizes, pooling)
        for layer in self.dense:
            pooled = layer(pooled)
        if not heads:
            return pooled
        told = self.heads.read(hidden, sizes.tolist(), heads)
        return [torch.cat([row.float(), more]) for row, more in zip(pooled, told, strict=True)]

    def _run_padded(self, batch: EncodeBatch) -> Tensor | list[Tensor]:
        bounds = np.concatenate([[0], np.cumsum(batch.lengths)])
        blocks = [
            self._run_block(batch, bounds, start, end) for start, end in _padding_runs(batch.lengths, self.padding)
        ]
        if batch.heads:
            return [row for block in blocks for row in block]
        return torch.cat(blocks)  # type: ignore[arg-type]

    def _run_block(
        self, batch: EncodeBatch, bounds: npt.NDArray[np.int64], start: int, end: int
    ) -> Tensor | list[Tensor]:
        lengths = batch.lengths[start:end]
        mask = np.arange(lengths.max())[None, :] < lengths[:, None]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        kinds = np.zeros(mask.shape, np.int64)
        ids[mask] = batch.ids[bounds[start] : bounds[end]]
        kinds[mask] = batch.type_ids[bounds[start] : bounds[end]]
        attended = self.tensor(mask)
        inputs = {"input_ids": self.tensor(ids), "attention_mask": attended.long()}
        if self.type_vocab_size:
            inputs["token_type_ids"] = self.tensor(kinds)
        if self.extend_at is not None:
            places = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int64), mask.shape)
            inputs["position_ids"] = self.tensor(self.coded(places, lengths[:, None]))
        if self.task == "reranker" and scored_last(self.module):
            hidden = base_of(self.module)(**inputs).last_hidden_state
            return classify(self.module, hidden[attended], self.tensor(lengths))
        if self.task == "reranker":
            return self.module(**inputs).logits
        hidden = self.module(**inputs).last_hidden_state
        return self._read(hidden[attended], self.tensor(lengths), batch.pooling[start:end], batch.heads[start:end])

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.device, tensor.dtype if tensor.dtype == torch.bool else torch.int64)


def _padding_runs(lengths: npt.NDArray[np.int64], padding: float = MAX_PADDING) -> list[tuple[int, int]]:
    """Cuts ascending lengths into runs [start, end) whose padding stays within a share of their positions."""
    cuts, total = [0], 0
    for i, length in enumerate(lengths.tolist()):
        total += length
        if total < (1 - padding) * length * (i + 1 - cuts[-1]):
            cuts.append(i)
            total = length
    return list(pairwise([*cuts, len(lengths)]))
