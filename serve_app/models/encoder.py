"""Loads an embedder or a reranker from a directory and turns it into a forward function over flat batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.engine.encoder.types import EncodeBatch, Pooling, Readout, Rows, TokenHead
from serve_app.kernels.linear.fused import tail_rows
from serve_app.models import encoder_attention
from serve_app.models.load import UnsupportedModel, read_config, require_safetensors
from serve_app.models.pooling import pool, read_pooling
from serve_app.models.token_heads import TokenHeads, load_token_heads

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
        return sum((end - start) * int(lengths[end - 1]) for start, end in _padding_runs(lengths))

    def _tail(self, tokens: int) -> int:
        """Positions behind a flat batch that nobody reads."""
        return tail_rows(tokens) if self.device.type == "cpu" else 0

    def _run_flat(self, batch: EncodeBatch) -> Tensor | list[Tensor]:
        lengths = batch.lengths.tolist()
        starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
        tokens = len(batch.ids)
        tail = self._tail(tokens)
        positions = np.arange(tokens, dtype=np.int64) - starts + self.first_position
        inputs = {
            "input_ids": self._tensor(np.pad(batch.ids, (0, tail))).unsqueeze(0),
            "position_ids": self._tensor(np.pad(positions, (0, tail), constant_values=self.first_position)).unsqueeze(
                0
            ),
            "use_cache": False,
            "runs": encoder_attention.length_runs(lengths),
        }
        if self.type_vocab_size:
            inputs["token_type_ids"] = self._tensor(np.pad(batch.type_ids, (0, tail))).unsqueeze(0)
        hidden = _base(self.module)(**inputs).last_hidden_state[0][:tokens]
        sizes = self._tensor(batch.lengths)
        if self.task == "embeddings":
            return self._read(hidden, sizes, batch.pooling, batch.heads)
        return _classify(self.module, hidden[sizes.cumsum(0) - sizes])

    def _read(
        self, hidden: Tensor, sizes: Tensor, pooling: list[Pooling], heads: list[tuple[TokenHead, ...]]
    ) -> Tensor | list[Tensor]:
        """Hidden states [T, H] of sequences of ``sizes`` tokens -> their rows."""
        pooled = pool(hidden, sizes, pooling)
        if not heads:
            return pooled
        told = self.heads.read(hidden, sizes.tolist(), heads)
        return [torch.cat([row.float(), more]) for row, more in zip(pooled, told, strict=True)]

    def _run_padded(self, batch: EncodeBatch) -> Tensor | list[Tensor]:
        bounds = np.concatenate([[0], np.cumsum(batch.lengths)])
        blocks = [self._run_block(batch, bounds, start, end) for start, end in _padding_runs(batch.lengths)]
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
        attended = self._tensor(mask)
        inputs = {"input_ids": self._tensor(ids), "attention_mask": attended}
        if self.type_vocab_size:
            inputs["token_type_ids"] = self._tensor(kinds)
        if self.task == "reranker":
            return self.module(**inputs).logits
        hidden = self.module(**inputs).last_hidden_state
        return self._read(hidden[attended], self._tensor(lengths), batch.pooling[start:end], batch.heads[start:end])

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.device, tensor.dtype if tensor.dtype == torch.bool else torch.int64)


def load_encoder(
    path: Path,
    task: Task,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    pooling: Pooling | None = None,
    max_length: int | None = None,
    optimise: bool = True,
) -> EncoderModel:
    """Loads safetensors weights with transformers' modelling code; nothing is downloaded and no code of the
    folder runs.

    ``dtype`` auto is float32 on CPU (vectors then agree with the authors' to 1e-5) and bfloat16 on a GPU.
    ``pooling`` overrides what the folder's sentence-transformers files say; without either it is ``mean``,
    for causal models ``last``. ``max_length`` lowers the limit given by the position table. Raises
    :class:`UnsupportedModel`.
    """
    if task not in ("embeddings", "reranker"):
        raise UnsupportedModel(f"task {task!r} is unknown; use embeddings or reranker")
    read_config(path)
    require_safetensors(path)
    defaults = read_pooling(path)
    started = time.perf_counter()
    from transformers import AutoModel, AutoModelForSequenceClassification

    encoder_attention.register()
    auto = AutoModel if task == "embeddings" else AutoModelForSequenceClassification
    module = _load(auto, path, task, dtype, device)
    loaded = time.perf_counter()
    config, base = module.config.get_text_config(), _base(module)
    first = _first_position(base)
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    usual: Pooling = "last" if "CausalLM" in "".join(config.architectures or []) else "mean"
    chosen: Pooling = "score" if task == "reranker" else pooling or defaults.pooling or usual
    model = EncoderModel(
        module=module,
        task=task,
        flat=False,
        readout=Readout(pooling=chosen, normalise=defaults.normalise),
        dimensions=config.hidden_size,
        max_length=min(max_length or 1 << 30, positions - first),
        vocab_size=config.vocab_size,
        type_vocab_size=getattr(config, "type_vocab_size", 0) or 0,
        first_position=first,
        pad_id=config.pad_token_id if config.pad_token_id is not None else 0,
        device=torch.device(device),
    )
    if task == "embeddings":
        model.heads = load_token_heads(path, config.hidden_size, next(module.parameters()).dtype, model.device)
    flat_reason = _try_flat(model)
    model.report = {
        "load_s": round(loaded - started, 2),
        "flat": model.flat,
        **({} if model.flat else {"padded_because": flat_reason}),
        **(_pack(model) if optimise and model.device.type == "cpu" else {}),
        "ready_s": round(time.perf_counter() - started, 2),
    }
    return model


def _load(auto: Any, path: Path, task: Task, dtype: str, device: str) -> Any:
    name = dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    if name == "float16" and device == "cpu":
        name = "float32"  # float16 arithmetic is far slower on CPUs, and float32 loses nothing
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise UnsupportedModel(f"dtype {dtype!r} is unknown; use auto, bfloat16, float16 or float32")
    try:
        module, info = auto.from_pretrained(
            path,
            dtype=getattr(torch, name),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{path} does not load as a {task} model: {error}") from error
    # An embedder's pooler is never used; anything else that is missing would be random numbers.
    missing = [k for k in info["missing_keys"] if task == "reranker" or not k.startswith("pooler.")]
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise UnsupportedModel(f"{path} lacks weights for {names}; is it a {task} checkpoint?")
    if task == "reranker" and module.config.num_labels != 1:
        raise UnsupportedModel(f"{path} has {module.config.num_labels} labels; a reranker has one score")
    return module.requires_grad_(False).eval().to(device)


def _base(module: Any) -> Any:
    return getattr(module, getattr(module, "base_model_prefix", ""), module)


def _first_position(base: Any) -> int:
    """RoBERTa's family numbers positions from padding_idx + 1, BERT's from 0."""
    embeddings = getattr(base, "embeddings", None)
    numbered = hasattr(embeddings, "create_position_ids_from_input_ids")
    return embeddings.padding_idx + 1 if embeddings is not None and numbered else 0


def _classify(module: Any, first: Tensor) -> Tensor:
    """The classification head on first tokens' hidden states [R, H] -> logits [R, 1]; heads index token 0
    themselves.
    """
    rows = first.unsqueeze(1)
    pooler = getattr(_base(module), "pooler", None)
    return module.classifier(pooler(rows) if pooler is not None else rows)


def _padding_runs(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cuts ascending lengths into runs [start, end) whose padding stays within :data:`MAX_PADDING` of their
    positions.
    """
    cuts, total = [0], 0
    for i, length in enumerate(lengths.tolist()):
        total += length
        if total < (1 - MAX_PADDING) * length * (i + 1 - cuts[-1]):
            cuts.append(i)
            total = length
    return list(pairwise([*cuts, len(lengths)]))


def _probe_batch(model: EncoderModel) -> EncodeBatch:
    rng = np.random.default_rng(0)
    lengths = np.array([n for n in (3, 6, 6, 11) if n <= model.max_length], np.int64)
    # Ids in the vocabulary's upper half keep clear of special tokens such as padding.
    ids = rng.integers(model.vocab_size // 2, model.vocab_size, int(lengths.sum())).astype(np.int32)
    kinds = rng.integers(0, max(model.type_vocab_size, 1), len(ids)).astype(np.int32)
    return EncodeBatch(ids, kinds, lengths, [model.readout.pooling] * len(lengths))


def _try_flat(model: EncoderModel) -> str:
    """Switches to flat batches where they give what the padded path gives; otherwise says why not.

    Models differ in what they pass to attention (windows, biases) and in where positions start, so this is
    tried.
    """
    batch = _probe_batch(model)
    expected = model.forward(batch)
    usual = model.module.config._attn_implementation
    try:
        model.module.set_attn_implementation(encoder_attention.NAME)
        model.flat = True
        reason = _differs(expected, model.forward(batch), model)
    except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        model.flat = False
        model.module.set_attn_implementation(usual)
    return reason


def _pack(model: EncoderModel) -> dict[str, Any]:
    from serve_app.kernels.linear.packed import pack_linears

    batch = _probe_batch(model)
    expected = model.forward(batch)
    packed = str(pack_linears(model.module))
    if reason := _differs(expected, model.forward(batch), model):
        raise RuntimeError(f"packed linears changed the model: {reason}")
    return {"linears": packed}


def _differs(expected: Any, found: Any, model: EncoderModel) -> str:
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(expected - found).max()) / scale
    # bfloat16 keeps 8 bits: more than rounding over a few layers is a wrong result.
    allowed = 1e-4 if next(model.module.parameters()).dtype == torch.float32 else 0.05
    return "" if error <= allowed else f"results differ by {error:.2g} (allowed {allowed:g})"
