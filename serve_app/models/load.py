"""Loads a causal language model from a directory and turns it into a forward function over flat batches."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.kv_cache import KVShape
from serve_app.engine.request import Request, SamplingParams
from serve_app.engine.runner import Forward
from serve_app.engine.step import Batch, Scheduled, build_batch
from serve_app.models import attention
from serve_app.models.quantization import quantize_linears

KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn}
Progress = Callable[[str], None]


class UnsupportedModel(ValueError):
    """The checkpoint can't be served; the text says why and what would help."""


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


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a model directory; raises :class:`UnsupportedModel` where there is none."""
    file = path / "config.json"
    if not file.is_file():
        raise UnsupportedModel(f"{path} has no config.json; give a directory in Hugging Face format")
    return json.loads(file.read_text())


def load_causal_lm(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    optimise: bool = True,
    progress: Progress = lambda stage: None,
) -> CausalModel:
    """Loads safetensors weights with transformers' own modelling code and checks that the cache can serve them.

    ``dtype`` is ``auto`` (the checkpoint's, float16 read as bfloat16 on CPU) or a torch dtype's name; ``quantization``
    is ``none``, ``int8``, ``int4`` (:mod:`serve_app.models.quantization`) or ``fp8``
    (:mod:`serve_app.kernels.linear.fp8`); ``kv_cache_dtype`` is ``auto`` (the model's) or ``fp8`` (e4m3, no scales).
    Raises :class:`UnsupportedModel` for a directory without safetensors, an architecture transformers does not have, or
    one whose attention does not go through transformers' interface.
    """
    config = read_config(path)
    require_safetensors(path)
    if kv_cache_dtype == "fp8" and torch.device(device).type == "cuda" and capability(device) < (8, 9):
        raise UnsupportedModel(
            "this GPU's compute capability is {}.{}, and a float8 cache needs 8.9; set kv_cache_dtype: auto".format(
                *capability(device)
            )
        )
    progress("importing")
    started = time.perf_counter()
    model_class = _model_class(config, path)
    imported = time.perf_counter()
    attention.register()
    progress("loading weights")
    module, report = _load_module(model_class, path, _dtype(dtype, config, device), torch.device(device), progress)
    module.requires_grad_(False)
    module.eval()
    module.to(device)
    loaded = time.perf_counter()
    report |= {"import_s": round(imported - started, 2), "load_s": round(loaded - imported, 2)}
    if quantization not in ("none", "fp8"):
        progress(f"quantising to {quantization}")
        report["quantization"] = quantize_linears(module, quantization)
    progress("optimising")
    text_config = module.config.get_text_config()
    model = CausalModel(
        forward=_forward(module),
        module=module,
        kv_shape=_kv_shape(text_config, KV_DTYPES[kv_cache_dtype] or module.dtype),
        vocab_size=text_config.vocab_size,
        max_model_len=min(max_model_len or 1 << 30, getattr(text_config, "max_position_embeddings", 1 << 30)),
        eos_token_ids=_eos_token_ids(module),
        device=torch.device(device),
        dtype=module.dtype,
        report=report,
    )
    _check_coverage(model, path)
    if optimise:
        from serve_app.models.optimise import optimise as improve

        try:
            report.update(improve(model, fp8=quantization == "fp8"))
        except ValueError as error:
            raise UnsupportedModel(f"{path}: {error}") from error
    report["ready_s"] = round(time.perf_counter() - started, 2)
    return model


def _load_module(
    model_class: Any, path: Path, dtype: torch.dtype, device: torch.device, progress: Progress
) -> tuple[Any, dict[str, Any]]:
    """The model on ``device``: by our own reader on GPUs where the checkpoint allows it, else by transformers."""
    report: dict[str, Any] = {}
    if device.type == "cuda":
        from serve_app.models import weights

        try:
            return weights.load_module(
                model_class, path, attn_implementation=attention.NAME, dtype=dtype, device=device, progress=progress
            )
        except (weights.NotPlain, AttributeError, TypeError) as reason:
            report["read_by"] = f"transformers: {reason}"
    module = model_class.from_pretrained(
        path,
        attn_implementation=attention.NAME,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return module, report


def require_safetensors(path: Path) -> None:
    """Refuses a directory whose weights could run code when read."""
    if not any(path.glob("*.safetensors")):
        others = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        found = f" (found {', '.join(others[:3])}, which are pickles and are never opened)" if others else ""
        raise UnsupportedModel(f"{path} has no *.safetensors{found}; convert it with safetensors.torch.save_file")


def _model_class(config: dict[str, Any], path: Path) -> Any:
    """The class named in the configuration, or whatever transformers maps the configuration to."""
    names = config.get("architectures") or []
    model_type = config.get("model_type", "")
    if not names or not model_type.replace("_", "").isalnum():
        raise UnsupportedModel(f'{path}/config.json names no architecture; add "architectures" and "model_type"')
    try:
        family = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        found = getattr(family, names[0])
    except (ImportError, AttributeError):
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        try:
            known = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            supported = type(known) in MODEL_FOR_CAUSAL_LM_MAPPING
        except ValueError:
            supported = False
        if not supported:
            raise UnsupportedModel(
                f"{names[0]} ({model_type}) is not an architecture of the installed transformers; code in a model's "
                "folder is never run"
            ) from None
        return AutoModelForCausalLM
    if not any(kind in names[0] for kind in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        raise UnsupportedModel(f"{names[0]} does not generate text; set the record's task to what it does")
    return found


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
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
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


def _forward(module: torch.nn.Module) -> Forward:
    def forward(batch: Batch) -> Tensor:
        capture = batch.capture
        output = module(
            **_inputs(module, batch),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            batch=batch,
            **({} if capture is None else {"output_hidden_states": True}),
        )
        if capture is not None:
            # hidden_states[i] is what enters layer i.
            capture.states = torch.stack([output.hidden_states[i][0] for i in capture.layers], 1)
        return output.logits[0]

    return forward


def _inputs(module: Any, batch: Batch) -> dict[str, Tensor]:
    if batch.embeddings is None:
        return {"input_ids": batch.input_ids.unsqueeze(0)}
    embedded = module.get_input_embeddings()(batch.input_ids)
    return {"inputs_embeds": batch.embeddings.put_into(embedded).unsqueeze(0)}


def _kv_shape(config: Any, dtype: torch.dtype) -> KVShape:
    if not hasattr(config, "num_attention_heads"):
        raise UnsupportedModel(
            f"{type(config).__name__} has no attention heads. Hybrid and linear-attention models can't use the paged "
            "cache yet"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVShape.uniform(config.num_hidden_layers, kv_heads, head_dim, dtype)


def _eos_token_ids(module: torch.nn.Module) -> frozenset[int]:
    ids: set[int] = set()
    for source in (module.generation_config, module.config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)


def _check_coverage(model: CausalModel, path: Path) -> None:
    """Runs four tokens and counts attention calls: a layer that goes around the interface would ignore the cache."""
    kv = model.kv_shape.allocate(2, model.device)
    request = Request("check", [1, 2, 3, 4], 4, SamplingParams(), root=b"", blocks=[1])
    calls: list[int] = []
    original = attention.paged_attention_forward

    def counting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(getattr(module, "layer_idx", -1))
        return original(module, *args, **kwargs)

    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, counting)
    try:
        with torch.inference_mode():
            model.forward(build_batch([Scheduled(request, 0, 4, 1)], kv))
    except (TypeError, ValueError, RuntimeError) as error:
        name = type(model.module).__name__
        raise UnsupportedModel(
            f"{name} in {path} can't run on the paged cache ({error}); use a decoder-only model"
        ) from error
    finally:
        AttentionInterface.register(attention.NAME, original)
    if sorted(calls) != list(range(len(model.kv_shape.layers))):
        raise UnsupportedModel(
            f"{type(model.module).__name__} in {path}: {len(set(calls))} of {len(model.kv_shape.layers)} layers use "
            "transformers' attention interface. Hybrid and linear-attention models can't use the paged cache yet"
        )
