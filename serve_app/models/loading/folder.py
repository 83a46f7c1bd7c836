"""What a model's folder must hold before anything is built from it.

A folder comes from anywhere, and its ``config.json`` may say anything. Sizes that no tensor in it has would make
transformers allocate, or build for ever, before it compares them; so they are compared here first, with the headers of
the safetensors files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Sizes that are never 0; others may be, where a model has no such part.
_WHOLE = {
    "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head",
    "n_heads", "vocab_size", "head_dim", "num_key_value_heads", "max_position_embeddings", "n_positions",
}  # fmt: skip
_COUNTED = {
    "num_layers", "decoder_layers", "encoder_layers", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "num_kv_heads", "n_head_kv", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    "num_experts_per_tok", "n_shared_experts", "num_shared_experts", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_kv", "type_vocab_size", "q_lora_rank",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_nextn_predict_layers", "embedding_size",
    "encoder_ffn_dim", "decoder_ffn_dim", "num_kv_shared_layers", "vocab_size_per_layer_input", "num_labels",
    "hidden_size_per_layer_input", "swa_head_dim", "global_head_dim", "rotary_dim", "first_k_dense_replace",
}  # fmt: skip
_POSITIONS = {
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "sliding_window", "attention_chunk_size",
}  # fmt: skip
MAX_POSITIONS = 1 << 30
# How much larger than the largest dimension of a tensor a size may be: weights of 4 bits lie eight in a number.
_PACKED = 8
# Weights that the files may lack: an encoder's pooler, and heads that are tied.
_LACKING = 1.5
_KINDS = {list: "list", str: "string", dict: "JSON object"}
_DTYPES = ("auto", "bfloat16", "float16", "float32")


class UnsupportedModel(ValueError):
    """The checkpoint can't be served; the text says why and what would help."""


@dataclass(slots=True, frozen=True)
class Contents:
    """What the safetensors files of a folder hold: ``largest`` is the largest dimension of any tensor, and
    ``elements`` are those of all."""

    tensors: int
    largest: int
    elements: int


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a model directory; raises :class:`UnsupportedModel` where there is none to read."""
    file = path / "config.json"
    if not file.is_file():
        raise UnsupportedModel(f"{path} has no config.json; give a directory in Hugging Face format")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UnsupportedModel(f"{file} can't be read as JSON: {str(error)[:200]}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{file} holds a {type(config).__name__}; it must be a JSON object")
    return config


def require_safetensors(path: Path) -> None:
    """Refuses a directory whose weights could run code when read."""
    if not any(path.glob("*.safetensors")):
        others = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        found = f" (found {', '.join(others[:3])}, which are pickles and are never opened)" if others else ""
        raise UnsupportedModel(f"{path} has no *.safetensors{found}; convert it with safetensors.torch.save_file")


def contents(path: Path) -> Contents:
    """Reads the headers of the folder's safetensors files. Raises :class:`UnsupportedModel` for a damaged one."""
    from safetensors import SafetensorError, safe_open

    tensors = largest = elements = 0
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a dictionary
                    shape = opened.get_slice(name).get_shape()
                    count = 1
                    for size in shape:
                        count *= size
                    tensors, elements, largest = tensors + 1, elements + count, max(largest, *shape, 1)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{file} is damaged: {error}; fetch it again") from error
    return Contents(tensors, largest, elements)


def fingerprint(path: Path) -> str:
    """Names the weights in ``path`` by content: configuration, tensor headers and samples of the data.

    Part of every cache key, so that weights replaced under the same name never meet the old ones' K/V. Reads about a
    hundred kilobytes per file, whatever its size.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            digest.update((path / name).read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, 1 << 20)))
            for part in range(16):
                stream.seek(part * max(0, size - 4096) // 15)
                digest.update(stream.read(4096))
    return digest.hexdigest()[:32]


def require_plausible(path: Path, config: dict[str, Any]) -> Contents:
    """Refuses a configuration whose values are of a wrong kind, or larger than anything in the folder. Raises
    :class:`UnsupportedModel`, which names the value."""
    file = path / "config.json"
    for name, kind in (("architectures", list), ("model_type", str), ("text_config", dict)):
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise UnsupportedModel(f"{file}: {name} is {_shown(config[name])}; it must be a {_KINDS[kind]}")
    if not all(isinstance(name, str) for name in config.get("architectures") or ()):
        raise UnsupportedModel(f"{file}: architectures must be names")
    _require_known_format(file, packing_of(config))
    found = contents(path)
    limit = _PACKED * max(found.tensors, found.largest)
    values = dict(_walk(config))
    for name, value in values.items():
        above, _, key = name.rpartition(".")
        if key == "head_dim" and value == 0 == values.get(f"{above}.qk_rope_head_dim" if above else "qk_rope_head_dim"):
            continue  # which in such models is what rotates of a head (GLM 5.3 Flash)
        several = isinstance(value, list) and key not in ("dtype", "torch_dtype")
        for item in value if several else [value]:
            reason = _objection(key, item, limit)
            if reason:
                raise UnsupportedModel(f"{file}: {name} is {_shown(value)}; {reason}")
    return found


def packing_of(config: dict[str, Any]) -> Any:
    """How weights are packed, which may stand beside what describes the language model; None for plain ones."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def _require_known_format(file: Path, described: Any) -> None:
    """Refuses packed weights that transformers would take for plain ones."""
    if not described:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = described.get("quant_method", "") if isinstance(described, dict) else described
    known = isinstance(method, str) and (
        method in AUTO_QUANTIZATION_CONFIG_MAPPING or method == "bitsandbytes" or not method
    )
    if not isinstance(described, dict) or not known:
        raise UnsupportedModel(
            f"{file}: quantization_config is {_shown(described)}; the installed transformers has no such format"
        )


def _objection(key: str, value: Any, limit: int) -> str:
    if key in ("dtype", "torch_dtype"):
        named = value is None or (isinstance(value, str) and value.removeprefix("torch.") in _DTYPES)
        return "" if named else f"use {', '.join(_DTYPES[1:])}"
    if key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        return "" if value is None or _whole(value) else "it must be the number of a token"
    if key not in _WHOLE | _COUNTED | _POSITIONS or value is None or isinstance(value, dict):
        return ""
    least = 1 if key in _WHOLE else -1 if key in _POSITIONS else 0
    most = MAX_POSITIONS if key in _POSITIONS else limit
    if not _whole(value):
        return "it must be a whole number"
    if value < least:
        return f"it must be at least {least}"
    return "" if value <= most else "nothing in the folder's weights is that large"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _walk(values: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value of nested objects with its name, ``text_config.hidden_size``."""
    for name, value in values.items():
        if isinstance(value, dict):
            if depth < 8 and name != "quantization_config":
                yield from _walk(value, f"{prefix}{name}.", depth + 1)
        else:
            yield prefix + name, value


def refuse_other_sizes(path: Path, info: dict[str, Any]) -> None:
    """Refuses weights of other sizes than ``config.json`` says. ``info`` is what transformers' ``from_pretrained``
    tells with ``output_loading_info``, and with ``ignore_mismatched_sizes``, without which it does not name them.
    """
    found = sorted(info.get("mismatched_keys") or (), key=str)
    if found:
        name, held, described = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UnsupportedModel(
            f"{path}: {name} is {list(held)}, and config.json describes {list(described)}{more}; it belongs to another "
            "model"
        )


def why(error: Exception) -> str:
    """What transformers objects to, in words; of a name that it does not find a KeyError has no more than the name."""
    if not isinstance(error, KeyError) or not error.args:
        return str(error)
    return str(error.args[0]) if " " in str(error.args[0]) else f"{error} is unknown or missing"


def require_weights(path: Path, model_class: Any, config: dict[str, Any], found: Contents) -> None:
    """Refuses a configuration that describes more weights than the folder has, before any of them is allocated.

    The model is built without memory. Raises :class:`UnsupportedModel`; what transformers itself objects to is left to
    its own loading.
    """
    if packing_of(config):
        return  # weights lie packed, in as many elements as their format likes
    described = _described(path, model_class)
    if described is None:
        return
    weights, tables = described
    if weights > _LACKING * found.elements + (1 << 20) or tables > 4 * found.elements + (1 << 26):
        raise UnsupportedModel(
            f"{path}/config.json describes {weights:,} weights and tables of {tables:,} numbers, the folder has "
            f"{found.elements:,}; it belongs to another model"
        )


def _described(path: Path, model_class: Any) -> tuple[int, int] | None:
    """Elements of the parameters and of the buffers of the model that ``config.json`` describes."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        named = hasattr(model_class, "config_class")  # and not one of transformers' Auto classes
        if named and not isinstance(config, model_class.config_class):
            config = config.get_text_config()
        with torch.device("meta"), no_init_weights():
            module = model_class._from_config(config) if named else model_class.from_config(config)
        module.tie_weights()
    except Exception:  # classes of models may object in any way they like
        return None
    return sum(t.numel() for t in module.parameters()), sum(t.numel() for t in module.buffers())


def generating(config: Any) -> list[Any]:
    """transformers' classes that generate text by ``config``. Code in a model's folder may have another name for them:
    Kimi K2.5's is KimiK25ForConditionalGeneration.
    """
    from transformers.models.auto import modeling_auto as auto

    found = []
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            classes = mapping[type(config)]
            found.append(classes[0] if isinstance(classes, tuple) else classes)
    return found


def class_of(config: dict[str, Any], path: Path) -> Any:
    """The class named in the configuration, or whatever transformers maps the configuration to."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = config.get("architectures") or []
    model_type = config.get("model_type") or ""
    if not names or not model_type.replace("_", "").replace("-", "").isalnum():
        raise UnsupportedModel(f'{path}/config.json names no architecture; add "architectures" and "model_type"')
    folder = model_type_to_module_name(model_type)
    try:
        found = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), names[0])
    except (ImportError, AttributeError):
        classes: list[Any] = []
        with contextlib.suppress(Exception):  # configurations object in any way they like
            known = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            classes = generating(known)
        if not classes:
            raise UnsupportedModel(
                f"{names[0]} ({model_type}) is not an architecture of the installed transformers; code in a model's "
                "folder is never run"
            ) from None
        return classes[0]
    generates = names[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "ForConditionalGeneration" in names[0]
    if not generates and not any(kind in names[0] for kind in ("ForCausalLM", "LMHeadModel")):
        raise UnsupportedModel(f"{names[0]} does not generate text; set the record's task to what it does")
    return found
