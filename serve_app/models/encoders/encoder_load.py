"""Loads an embedder or a reranker from a directory, and compares what it computes with itself in other batches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve_app.engine.encoder.types import EncodeBatch, Pooling, Readout
from serve_app.models.encoders import encoder_attention
from serve_app.models.encoders.encoder import MAX_PADDING, EncoderModel, Task
from serve_app.models.encoders.pooling import read_pooling
from serve_app.models.encoders.scores import base_of, score_by_answer
from serve_app.models.encoders.token_heads import load_token_heads
from serve_app.models.loading import kept
from serve_app.models.loading.folder import (
    UnsupportedModel,
    fingerprint,
    read_config,
    refuse_other_sizes,
    require_plausible,
    require_safetensors,
    require_weights,
    why,
)
from serve_app.models.longrope import replace_rotary
from serve_app.models.mixtures.experts import leave_odd_experts


@dataclass(slots=True)
class Compared:
    """What comparisons have found of a model that can be served; see :class:`EncoderModel`."""

    padding: float
    flat: bool
    padded_because: str


def load_encoder(
    path: Path,
    task: Task,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    pooling: Pooling | None = None,
    max_length: int | None = None,
    optimise: bool = True,
    remember: bool = False,
) -> EncoderModel:
    """Loads safetensors weights with transformers' modelling code; nothing is downloaded and no code of the
    folder runs.

    ``dtype`` auto is float32 on CPU (vectors then agree with the authors' to 1e-5) and bfloat16 on a GPU.
    ``pooling`` overrides what the folder's sentence-transformers files say; without either it is ``mean``,
    for causal models ``last``. ``max_length`` lowers the limit given by the position table.
    ``remember``: what comparisons have found of these weights is kept for the next start. Raises
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
    positions = getattr(config, "max_position_embeddings", None) or -1
    positions = positions if positions > 0 else 1 << 20  # -1 stands for any number
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
        padding=0.0 if _chooses_by_length(base) else MAX_PADDING,
    )
    about = (task, dtype, _computes(model.device), chosen, str(max_length), fingerprint(path)) if remember else ()
    known = kept.read(Compared, *about) if remember and optimise else None
    if known is None:
        _check_alone(model, path)
    else:
        model.padding = known.padding
    if task == "embeddings":
        model.heads = load_token_heads(path, config.hidden_size, next(module.parameters()).dtype, model.device)
    if known is None:
        flat_reason = _try_flat(model)
    else:
        flat_reason = known.padded_because
        if known.flat:
            _make_flat(model)
    packs = optimise and model.device.type == "cpu"
    packed, differs = _pack(model, compares=known is None) if packs else ("", "")
    if differs:
        # Each linear agreed, and roundings grew over the layers: a model like that is served as transformers has it.
        plain = load_encoder(
            path, task, dtype=dtype, device=device, pooling=pooling, max_length=max_length, optimise=False
        )
        plain.report["linears"] = f"left as they are: with packed ones {differs}"
        return plain
    if remember and optimise and known is None:
        kept.write(Compared(model.padding, model.flat, flat_reason), *about)
    model.report = {
        "load_s": round(loaded - started, 2),
        "flat": model.flat,
        **({} if model.flat else {"padded_because": flat_reason}),
        **({"linears": packed} if packed else {}),
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
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # configurations and models object in any way they like
        raise UnsupportedModel(f"{path} does not load as a {task} model: {why(error)}") from error
    refuse_other_sizes(path, info)
    if task == "reranker" and type(module).__name__.endswith("ForCausalLM"):
        score_by_answer(module, path)
    # An embedder's pooler is never used; anything else that is missing would be random numbers.
    missing = [k for k in info["missing_keys"] if task == "reranker" or not k.startswith("pooler.")]
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise UnsupportedModel(f"{path} lacks weights for {names}; is it a {task} checkpoint?")
    if task == "reranker" and not type(module).__name__.endswith("ForCausalLM") and module.config.num_labels != 1:
        raise UnsupportedModel(f"{path} has {module.config.num_labels} labels; a reranker has one score")
    leave_odd_experts(module)
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
        own = transformers.models.auto.modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.get("model_type"))
        whole = config.get("is_encoder_decoder") or (own or "").endswith("EncoderModel")
        return transformers.AutoModelForTextEncoding if whole else transformers.AutoModel
    if any(name.endswith("ForCausalLM") for name in config.get("architectures") or ()):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForSequenceClassification


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
    batch, described = _probe_batch(model), model.module.config.to_dict()
    bounds = np.concatenate([[0], np.cumsum(batch.lengths)])
    try:
        with torch.inference_mode():
            alone = []
            for index, (start, end) in enumerate(pairwise(bounds.tolist())):
                kinds = batch.type_ids[start:end]
                one = EncodeBatch(batch.ids[start:end], kinds, batch.lengths[index : index + 1], batch.pooling[:1])
                alone.append(model.forward(one))
                if model.task == "reranker" and not type(model.module).__name__.endswith("ForCausalLM"):
                    inputs = {"input_ids": model.tensor(one.ids)[None]}
                    if model.type_vocab_size:
                        inputs["token_type_ids"] = model.tensor(kinds)[None]
                    if model.extend_at is not None:
                        places = np.arange(len(one.ids), dtype=np.int64)
                        inputs["position_ids"] = model.tensor(model.coded(places, one.lengths))[None]
                    own = model.module(**inputs).logits.float().cpu().numpy()
                    if reason := _differs(own, alone[-1], model):
                        raise UnsupportedModel(f"{path}: its score is read in another way than supported: {reason}")
            found = model.module.config.to_dict()
            if changed := [name for name in described if described[name] != found[name]]:
                raise UnsupportedModel(
                    f"{type(model.module).__name__} in {path} changes {', '.join(changed)} in its configuration with "
                    "the first text that it reads, and with it what later texts give; set it in config.json"
                )
            if _draws(model, one):
                raise UnsupportedModel(
                    f"{type(model.module).__name__} in {path} draws random numbers where it attends: each time a text "
                    "would get another vector; fix its seed in config.json if it has one (hash_seed)"
                )
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


def _draws(model: EncoderModel, batch: EncodeBatch) -> bool:
    """Whether a pass reads torch's generator as it stands; one that sets it first is the same every time."""
    ends = []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            model.forward(batch)
            if torch.equal(before, torch.get_rng_state()):
                return False
            ends.append(torch.get_rng_state())
    return not torch.equal(*ends)


def _chooses_by_length(base: Any) -> bool:
    """Whether the length of a text chooses its attention. BigBird, which does so, stays with full attention from its
    first short text on; here each batch decides for itself."""
    if not hasattr(base, "set_attention_type"):
        return False
    asked, config = base.attention_type, base.config
    longest = (5 + 2 * config.num_random_blocks) * config.block_size

    def choose(base: Any, unnamed: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = unnamed[0] if unnamed else named["input_ids"]
        base.set_attention_type(asked if ids.shape[1] > longest else "original_full")

    base.register_forward_pre_hook(choose, with_kwargs=True)
    return True


def _try_flat(model: EncoderModel) -> str:
    """Switches to flat batches where they give what the padded path gives; otherwise says why not.

    Models differ in what they pass to attention (windows, biases) and in where positions start, so this is
    tried.
    """
    if reason := _beyond_probes(model):
        return reason
    batch = _probe_batch(model)
    expected = model.forward(batch)
    usual = model.module.config._attn_implementation
    try:
        _make_flat(model)
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


def _computes(device: torch.device) -> str:
    """What rounds as it does."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _make_flat(model: EncoderModel) -> None:
    model.module.set_attn_implementation(encoder_attention.NAME)
    model.flat = True


def _beyond_probes(model: EncoderModel) -> str:
    """What longer texts than those that are tried need of masks, or of positions that are counted along a batch; "" if
    there is nothing."""
    config: Any = model.module.config.get_text_config()
    kinds, longest = getattr(config, "layer_types", None), model.max_length
    for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        try:
            size = getattr(config, name, None)
        except RuntimeError:  # which transformers raises where layers differ in it
            return f"layers differ in {name}"
        if isinstance(size, int) and 0 < size < longest and (not kinds or kind in kinds):
            return f"texts of more than {size} tokens see less than all of them ({name})"
    if getattr(config, "attn_temperature_tuning", False) and (getattr(config, "floor_scale", None) or 1) < longest:
        return "queries are scaled by their place in the batch (attn_temperature_tuning)"
    return ""


def _pack(model: EncoderModel, *, compares: bool) -> tuple[str, str]:
    """Packs the model's linears, each of which is compared with itself; returns what was done, and, where all of them
    together are compared as well, how far results differ where that is too far."""
    from serve_app.kernels.linear.packed import pack_linears

    if not compares:
        return str(pack_linears(model.module)), ""
    batch = _probe_batch(model)
    expected = model.forward(batch)
    packed = str(pack_linears(model.module))
    return packed, _differs(expected, model.forward(batch), model)


def _differs(expected: Any, found: Any, model: EncoderModel) -> str:
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(expected - found).max()) / scale
    # bfloat16 keeps 8 bits: more than rounding over a few layers is a wrong result.
    allowed = 1e-4 if next(model.module.parameters()).dtype == torch.float32 else 0.05
    return "" if error <= allowed else f"results differ by {error:.2g} (allowed {allowed:g})"
