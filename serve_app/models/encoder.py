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
from torch import Tensor, nn

from serve_app.engine.encoder.types import EncodeBatch, Pooling, Readout, Rows, TokenHead
from serve_app.kernels.linear.fused import tail_rows
from serve_app.models import encoder_attention
from serve_app.models.folder import (
    UnsupportedModel,
    read_config,
    require_plausible,
    require_safetensors,
    require_weights,
)
from serve_app.models.longrope import replace_rotary
from serve_app.models.pooling import pool, read_pooling
from serve_app.models.scores import base_of, classify, score_by_answer, scored_last
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
        positions = self._coded(
            np.arange(tokens, dtype=np.int64) - starts + self.first_position, np.repeat(batch.lengths, batch.lengths)
        )
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
        hidden = base_of(self.module)(**inputs).last_hidden_state[0][:tokens]
        sizes = self._tensor(batch.lengths)
        if self.task == "embeddings":
            return self._read(hidden, sizes, batch.pooling, batch.heads)
        return classify(self.module, hidden, sizes)

    def _coded(self, positions: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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
        attended = self._tensor(mask)
        inputs = {"input_ids": self._tensor(ids), "attention_mask": attended}
        if self.type_vocab_size:
            inputs["token_type_ids"] = self._tensor(kinds)
        if self.extend_at is not None:
            places = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int64), mask.shape)
            inputs["position_ids"] = self._tensor(self._coded(places, lengths[:, None]))
        if self.task == "reranker" and scored_last(self.module):
            hidden = base_of(self.module)(**inputs).last_hidden_state
            return classify(self.module, hidden[attended], self._tensor(lengths))
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
    described = read_config(path)
    require_safetensors(path)
    found = require_plausible(path, described)
    defaults = read_pooling(path)
    started = time.perf_counter()
    encoder_attention.register()
    auto = _auto_class(path, task)
    require_weights(path, auto, described, found)
    module = _load(auto, path, task, dtype, device)
    try:
        extend_at = replace_rotary(module, generates=False)
    except ValueError as error:
        raise UnsupportedModel(f"{path} can't be served: {error}") from error
    loaded = time.perf_counter()
    config, base = module.config.get_text_config(), base_of(module)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise UnsupportedModel(
            f"{path}: {type(config).__name__} names no vocabulary; only models of tokens are supported"
        )
    first = _first_position(base)
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    usual: Pooling = "last" if "CausalLM" in "".join(config.architectures or []) else "mean"
    chosen: Pooling = "score" if task == "reranker" else pooling or defaults.pooling or usual
    model = EncoderModel(
        module=module,
        task=task,
        flat=False,
        readout=Readout(pooling=chosen, normalise=defaults.normalise),
        dimensions=defaults.dense[-1][0].out_features if defaults.dense else config.hidden_size,  # type: ignore[index]
        max_length=min(max_length or 1 << 30, positions - first),
        vocab_size=config.vocab_size,
        type_vocab_size=getattr(config, "type_vocab_size", 0) or 0,
        first_position=first,
        pad_id=getattr(config, "pad_token_id", None) or 0,
        device=torch.device(device),
        dense=tuple(layer.to(device) for layer in defaults.dense) if task == "embeddings" else (),
        extend_at=extend_at,
    )
    _check_alone(model, path)
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
    except Exception as error:  # configurations and models object in any way they like
        raise UnsupportedModel(f"{path} does not load as a {task} model: {error}") from error
    if task == "reranker" and type(module).__name__.endswith("ForCausalLM"):
        score_by_answer(module, path)
    # An embedder's pooler is never used; anything else that is missing would be random numbers.
    missing = [k for k in info["missing_keys"] if task == "reranker" or not k.startswith("pooler.")]
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise UnsupportedModel(f"{path} lacks weights for {names}; is it a {task} checkpoint?")
    if task == "reranker" and not type(module).__name__.endswith("ForCausalLM") and module.config.num_labels != 1:
        raise UnsupportedModel(f"{path} has {module.config.num_labels} labels; a reranker has one score")
    return module.requires_grad_(False).eval().to(device)


def _first_position(base: Any) -> int:
    """RoBERTa's family numbers positions from padding_idx + 1, BERT's from 0."""
    embeddings = getattr(base, "embeddings", None)
    numbered = hasattr(embeddings, "create_position_ids_from_input_ids")
    return embeddings.padding_idx + 1 if embeddings is not None and numbered else 0


def _auto_class(path: Path, task: Task) -> Any:
    """The class of transformers that reads the folder's architecture for ``task``."""
    import transformers

    config = read_config(path)
    if task == "embeddings":
        # Of an encoder-decoder only the encoder reads a text by itself.
        whole = config.get("is_encoder_decoder") or config.get("model_type") in ("t5", "mt5", "umt5")
        return transformers.AutoModelForTextEncoding if whole else transformers.AutoModel
    if any(name.endswith("ForCausalLM") for name in config.get("architectures") or ()):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForSequenceClassification


def _padding_runs(lengths: npt.NDArray[np.int64], padding: float = MAX_PADDING) -> list[tuple[int, int]]:
    """Cuts ascending lengths into runs [start, end) whose padding stays within a share of their positions."""
    cuts, total = [0], 0
    for i, length in enumerate(lengths.tolist()):
        total += length
        if total < (1 - padding) * length * (i + 1 - cuts[-1]):
            cuts.append(i)
            total = length
    return list(pairwise([*cuts, len(lengths)]))


def _probe_batch(model: EncoderModel) -> EncodeBatch:
    rng = np.random.default_rng(0)
    # Neighbours close enough to be padded to one length, short and long.
    lengths = np.array([n for n in (3, 6, 6, 11, 12, 13, 90, 96) if n <= model.max_length], np.int64)
    # Ids in the vocabulary's upper half keep clear of special tokens such as padding.
    ids = rng.integers(model.vocab_size // 2, model.vocab_size, int(lengths.sum())).astype(np.int32)
    kinds = rng.integers(0, max(model.type_vocab_size, 1), len(ids)).astype(np.int32)
    return EncodeBatch(ids, kinds, lengths, [model.readout.pooling] * len(lengths))


def _check_alone(model: EncoderModel, path: Path) -> None:
    """Compares padded batches with each sequence alone, and a reranker's reading of its head with the model's own.
    Where padding shows in other sequences' results, only equal lengths share a batch."""
    batch = _probe_batch(model)
    bounds = np.concatenate([[0], np.cumsum(batch.lengths)])
    try:
        with torch.inference_mode():
            alone = []
            for index, (start, end) in enumerate(pairwise(bounds.tolist())):
                kinds = batch.type_ids[start:end]
                one = EncodeBatch(batch.ids[start:end], kinds, batch.lengths[index : index + 1], batch.pooling[:1])
                alone.append(model.forward(one))
                if model.task == "reranker" and not type(model.module).__name__.endswith("ForCausalLM"):
                    inputs = {"input_ids": model._tensor(one.ids)[None]}
                    if model.type_vocab_size:
                        inputs["token_type_ids"] = model._tensor(kinds)[None]
                    if model.extend_at is not None:
                        places = np.arange(len(one.ids), dtype=np.int64)
                        inputs["position_ids"] = model._tensor(model._coded(places, one.lengths))[None]
                    own = model.module(**inputs).logits.float().cpu().numpy()
                    if reason := _differs(own, alone[-1], model):
                        raise UnsupportedModel(f"{path}: its score is read in another way than supported: {reason}")
            expected = np.concatenate(alone)
            if _differs(expected, model.forward(batch), model):
                model.padding = 0.0
                if reason := _differs(expected, model.forward(batch), model):
                    raise UnsupportedModel(f"{path}: a sequence's result depends on its batch: {reason}")
    except UnsupportedModel:
        raise
    except Exception as error:  # classes of models object in any way they like
        name = type(model.module).__name__
        raise UnsupportedModel(f"{name} in {path} can't encode texts ({type(error).__name__}: {error})") from error


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
        if not reason and model.max_length <= 1024:
            # Longer together than one may be: some models refuse that, or have no more positions.
            longest = int(batch.lengths[-1])
            count = model.max_length // longest + 2
            ids, kinds = (np.tile(x[-longest:], count) for x in (batch.ids, batch.type_ids))
            many = EncodeBatch(ids, kinds, np.full(count, longest), [model.readout.pooling] * count)
            reason = _differs(np.tile(expected[-1:], (count, 1)), model.forward(many), model)
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
