"""Loads a causal language model from a directory and turns it into a forward function over flat batches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.kv_cache import KVShape
from serve_app.engine.rules import Rules
from serve_app.engine.runner import Forward
from serve_app.kernels.gpu.backend import takes_latents
from serve_app.models import attention
from serve_app.models.adapters import AdapterBank, bank_plug
from serve_app.models.compressed import compressed_layers, showing_linears
from serve_app.models.divided.adapters import part_bank
from serve_app.models.divided.check import check_part
from serve_app.models.divided.division import looking
from serve_app.models.divided.load import PartOfModel, load_part, refuse_divided
from serve_app.models.encoding import media_encoders
from serve_app.models.indexed import IndexedLayer, indexed_layers
from serve_app.models.linears import Current, Plug, chained, linears_by_row, plug_modules
from serve_app.models.loading.adapt import reading
from serve_app.models.loading.check import check
from serve_app.models.loading.folder import (
    UnsupportedModel,
    class_of,
    packing_of,
    read_config,
    refuse_other_sizes,
    require_plausible,
    require_safetensors,
    require_weights,
    why,
)
from serve_app.models.loading.generation import end_tokens, read_rules
from serve_app.models.loading.held import held_bytes
from serve_app.models.loading.observe import Unservable
from serve_app.models.loading.packed import load_packed, read_here
from serve_app.models.loading.prepare import prepare
from serve_app.models.loading.stored import keeps_codes, keeps_latents
from serve_app.models.media import MediaEncoder
from serve_app.models.mixtures.coded import take_codes
from serve_app.models.mixtures.mixture import own_weights
from serve_app.models.quantization import quantize_linears
from serve_app.models.stateful import StatefulLayer, stateful_layers
from serve_app.parallel.group import Group
from serve_app.wire.ranks import RankLayer

KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn}
Progress = Callable[[str], None]


@dataclass(slots=True)
class CausalModel:
    """A loaded model: how to run it, the shape of its cache, and what its configuration says."""

    forward: Forward
    module: torch.nn.Module
    kv_shape: KVShape
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype  # of weights and activations; the cache has its own
    report: dict[str, Any]
    # Longer texts are rotated with other frequencies (`serve_app.models.longrope`); `recompute`: a text that grows
    # beyond is computed anew.
    extend_at: int | None = None
    recompute: bool = False
    chooses: bool = False  # which keys it attends to (`serve_app.models.indexed`)
    rules: Rules | None = None  # what its folder asks of each answer
    adapters: AdapterBank | None = None  # None: the model was loaded without places for adapters
    # Where several ranks divide the model: what this one keeps of each of its layers.
    part: tuple[RankLayer, ...] = ()
    # Makes of a pass over this rank's part one over the whole model.
    shared: Callable[[Forward], Forward] = lambda forward: forward
    agree: Callable[[bool], bool] = lambda ok: ok  # whether all its ranks say yes
    # By medium; none for one that it does not take, or whose way is not known here.
    encoders: dict[str, MediaEncoder] = field(default_factory=dict)


def load_causal_lm(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    optimise: bool = True,
    plug: Plug | None = None,
    adapters: int = 0,
    group: Group | None = None,
    counts: Path | None = None,
    progress: Progress = lambda stage: None,
) -> CausalModel:
    """Loads safetensors weights with transformers' own modelling code and checks that the cache can serve them.

    ``dtype`` is ``auto`` (the checkpoint's, float16 read as bfloat16 on CPU) or a torch dtype's name; ``quantization``
    is ``none``, ``int8``, ``int4`` (:mod:`serve_app.models.quantization`) or ``fp8``
    (:mod:`serve_app.kernels.linear.fp8`); ``kv_cache_dtype`` is ``auto`` (the model's) or ``fp8`` (e4m3, no scales).
    ``plug`` may put linears of its own into the model's (:mod:`serve_app.models.linears`); ``adapters`` is the number
    of places for LoRA adapters (:mod:`serve_app.models.adapters`). With ``group`` every rank calls it and gets
    its part, whose forward pass is all ranks' together (:mod:`serve_app.models.divided`); ``counts`` is the folder with
    what experts had to do.
    Raises :class:`UnsupportedModel` for a directory without safetensors, an architecture transformers does not have, or
    one that does not compute on the paged cache what transformers computes (:mod:`serve_app.models.loading.check`).
    """
    config = read_config(path)
    require_safetensors(path)
    found = require_plausible(path, config)
    if kv_cache_dtype == "fp8" and torch.device(device).type == "cuda" and capability(device) < (8, 9):
        raise UnsupportedModel(
            "this GPU's compute capability is {}.{}, and a float8 cache needs 8.9; set kv_cache_dtype: auto".format(
                *capability(device)
            )
        )
    progress("importing")
    started = time.perf_counter()
    model_class = class_of(config, path)
    require_weights(path, model_class, config, found)
    imported = time.perf_counter()
    attention.register()
    progress("loading weights")
    name = f"{config['architectures'][0]} in {path}"
    part: PartOfModel | None = None
    report: dict[str, Any]
    try:
        wanted = _dtype(dtype, config, device)
        codes = keeps_codes(adapters=bool(adapters), quantization=quantization)
        if group is not None:
            refuse_divided(family=config.get("model_type", ""), plug=plug)
            part = load_part(
                model_class, path, dtype=wanted, group=group, quantization=quantization, counts=counts, codes=codes
            )
            refuse_contradictions(path, part.module, part.info)
            module, report = part.module, {"read_bytes": part.read_bytes, "held_bytes": part.held_bytes}
            if part.balanced:
                report["expert_copies"] = part.balanced
            if adapters:
                part.shares.least = 0  # which rows have one is known of all rows together
            group.agree(True)  # one may read longer than another
        else:
            module, report = _load_module(model_class, path, wanted, torch.device(device), progress, codes=codes)
        module.requires_grad_(False)
        module.eval()
        module.to(device)
        if coded := take_codes(module, wanted):
            report["coded_experts"] = coded
        kind = type(module)
        if part is None or group is None:
            verdict = check(kind, module.config)
        else:
            verdict = check_part(kind, module.config, group, part.shares)
            if part.shares.least:
                report["expert_dispatch"] = f"rows of steps from {part.shares.least} on"
        latents = verdict.latents and keeps_latents(adapters=bool(adapters), quantization=quantization)
        latents = latents and takes_latents(torch.device(device))
        prepared = prepare(module, torch.device(device), latents=latents)
        if part is not None:
            prepared.vocab_size = part.division.vocab
    except Unservable as error:
        raise UnsupportedModel(f"{name} can't be served: {error}") from error
    loaded = time.perf_counter()
    report |= {"import_s": round(imported - started, 2), "load_s": round(loaded - imported, 2)}
    if quantization not in ("none", "fp8"):
        progress(f"quantising to {quantization}")
        report["quantization"] = quantize_linears(module, quantization)
    progress("optimising")
    text_config = module.config.get_text_config()
    model = CausalModel(
        forward=prepared.forward,
        module=module,
        kv_shape=prepared.kv_shape(KV_DTYPES[kv_cache_dtype] or module.dtype),
        vocab_size=prepared.vocab_size,
        max_model_len=min(max_model_len or 1 << 30, getattr(text_config, "max_position_embeddings", None) or 1 << 30),
        eos_token_ids=end_tokens(module, path),
        device=torch.device(device),
        dtype=module.dtype,
        report=report,
        extend_at=prepared.extend_at,
        recompute=prepared.recompute,
        chooses=bool(indexed_layers(module)) or bool(compressed_layers(module)),
    )
    summing: Plug | None = None
    if part is not None and group is not None:
        model.part, model.shared, model.agree = part.cache(prepared.layers), part.sharing(group), group.agree
        model.forward, summing = model.shared(prepared.forward), part.summing(group)
    if group is None or not group.place.rank:
        model.encoders = media_encoders(module)
    model.rules, ignored = read_rules(module, path)
    if ignored:
        report["generation_config"] = f"not followed: {ignored}"
    report |= verdict.report()
    if verdict.differs:
        raise UnsupportedModel(f"{name} can't be served: {verdict.differs}")
    own: dict[str, dict[str, tuple[int, ...]]] = {}
    if adapters:
        model.adapters = part_bank(adapters, model.device, part.division if part is not None else None)
        own = own_weights(module)
    if optimise:
        from serve_app.models.loading.optimise import Differs
        from serve_app.models.loading.optimise import optimise as improve

        changed = ""
        try:
            fp8 = quantization == "fp8"
            aside = looking(module).values()
            report.update(improve(model, fp8=fp8, fused=verdict.fused_differs, plug=plug, outer=summing, aside=aside))
        except ValueError as error:
            raise UnsupportedModel(f"{path}: {error}") from error
        except Differs as error:
            changed = str(error)
        if changed:
            del model, module, prepared, part  # memory for one of them is all there may be
            plain = load_causal_lm(
                path, dtype=dtype, device=device, max_model_len=max_model_len, quantization=quantization,
                kv_cache_dtype=kv_cache_dtype, optimise=False, plug=plug, adapters=adapters, group=group,
                counts=counts, progress=progress,
            )  # fmt: skip
            plain.report["linears"] = f"left as they are: {changed}"
            return plain
    if "fused_decoder" not in report and (every := chained(plug, bank_plug(model.adapters))) is not None:
        from serve_app.models.loading.compare import probe

        current = Current()
        inner: list[StatefulLayer | IndexedLayer] = [*stateful_layers(module), *indexed_layers(module)]
        for layer in inner:
            layer.current = current
        local = model.forward if part is None else part.local_of(model.forward)
        forward = model.shared(current.around(local))
        # A plug sees for itself what it replaces; adapters go where rows are tokens.
        with showing_linears(module):
            only = linears_by_row(module, current, lambda: probe(model, forward), own) if plug is None else None
        report["plugged"] = plug_modules(module, every, current, only)
        if model.adapters is not None and only is not None:
            model.adapters.plug_mixtures(module, own, only, current)
        model.forward = forward
    if model.device.type == "cpu":
        report["weight_bytes"] = held_bytes(module, getattr(model.forward, "local", model.forward))
    report["ready_s"] = round(time.perf_counter() - started, 2)
    return model


def _load_module(
    model_class: Any, path: Path, dtype: torch.dtype, device: torch.device, progress: Progress, *, codes: bool
) -> tuple[Any, dict[str, Any]]:
    """The model: on ``device`` by our own reader on GPUs where the checkpoint allows it, else by transformers. With
    ``codes`` experts in few bits stay so where they compute on these.
    """
    report: dict[str, Any] = {}
    if device.type == "cuda":
        from serve_app.models.loading import weights

        try:
            return weights.load_module(
                model_class, path, attn_implementation=attention.NAME, dtype=dtype, device=device, progress=progress
            )
        except (weights.NotPlain, AttributeError, TypeError) as reason:
            report["read_by"] = f"transformers: {reason}"
    config = read_config(path)
    try:
        if read_here(config, device):
            module, info = load_packed(model_class, path, packing_of(config), dtype=dtype, device=device, codes=codes)
            refuse_contradictions(path, module, info)
            return module, report
        module, info = model_class.from_pretrained(path, **reading(model_class, dtype))
    except UnsupportedModel:
        raise
    except Exception as error:  # configurations and models object in any way they like
        if isinstance(error, KeyError) and attention.NAME in str(error):
            raise Unservable("its attention does not go through transformers' attention interface") from error
        raise UnsupportedModel(f"{path} does not load as {model_class.__name__}: {why(error)}") from error
    refuse_contradictions(path, module, info)
    return module, report


def refuse_contradictions(path: Path, module: Any, info: dict[str, Any]) -> None:
    """Refuses weights that ``config.json`` does not describe: what is missing would be random numbers, and layers that
    nobody asks for are a part of the model.
    """
    refuse_other_sizes(path, info)
    if missing := sorted(info.get("missing_keys") or ()):
        raise UnsupportedModel(
            f"{path} lacks weights for {', '.join(missing[:3])}; config.json describes another model"
        )
    unread = sorted(name for name in info.get("unexpected_keys") or () if name.endswith("_scale_inv"))
    if unread:
        raise UnsupportedModel(
            f"{path} has scales that nothing reads, {', '.join(unread[:3])}: their weights would be other numbers; use "
            "a checkpoint with each expert's weights apart, or plain ones"
        )
    own = {_unnumbered(name) for name, _ in module.named_parameters()}
    more = sorted(name for name in info.get("unexpected_keys") or () if _unnumbered(name) in own)
    if more:
        raise UnsupportedModel(f"{path} has weights for {', '.join(more[:3])}, which config.json does not name")


def _unnumbered(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _dtype(name: str, config: dict[str, Any], device: str) -> torch.dtype:
    if name == "auto":
        text = config.get("text_config") or {}
        name = (
            config.get("dtype")
            or config.get("torch_dtype")
            or text.get("dtype")
            or text.get("torch_dtype")
            or "bfloat16"
        )
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedModel(f"dtype {name!r} is unknown; use auto, bfloat16, float16 or float32")
    # float16 arithmetic is about ten times slower than bfloat16 on CPUs.
    if dtype == torch.float16 and device == "cpu":
        return torch.bfloat16
    if dtype == torch.bfloat16 and torch.device(device).type == "cuda" and capability(device) < (8, 0):
        return torch.float16  # which the GPU computes in hardware, unlike bfloat16
    return dtype


def capability(device: str) -> tuple[int, int]:
    """A GPU's compute capability, (9, 0) on an H100."""
    return torch.cuda.get_device_capability(torch.device(device))
