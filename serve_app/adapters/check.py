"""What is checked of an adapter's weights when they are uploaded: names, shapes and numbers, against its configuration
and the modules of its base model. Reads the file in pieces; needs neither torch nor the base's weights.

The format of safetensors: eight bytes with the length of the header, the header (JSON: by name dtype, shape and
data_offsets), the data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from serve_app.adapters.config import LARGEST_RANK, AdapterConfig, AdapterRefused, is_joined
from serve_app.adapters.mixture import Target, require_all, target_of
from serve_app.adapters.shapes import Base

PREFIX = "base_model.model."
# About a hundred bytes a tensor.
MAX_HEADER = 8 << 20
_SLICE = 4 << 20
# More than any tensor has.
_MOST_SIZES = 8
# Bytes of a number, and the bits of its exponent, which are all set in what is infinite or not a number.
_DTYPES: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
_AGAIN = "save the adapter again with save_pretrained, and upload the whole file"
_PARTS = (".lora_A.weight", ".lora_B.weight")
# What PEFT writes beside an adapter and that changes nothing: the base's own weights of an output layer that has one,
# and what VeLoRA (arXiv 2405.17991) has compressed activations with in training.
_OWN = ".base_layer.weight"
UNUSED = (_OWN, ".lora_velora_embed")
# Of a key, what it belongs to.
_OTHERS = (
    (r"lora_magnitude_vector", "DoRA, which is not served; train with use_dora=False"),
    (r"lora_embedding_", "an adapter of embeddings, which is not served; take them out of target_modules"),
    (r"lora_[AB]\.bias$|\.bias$", "a bias, which is not served; train with bias='none' and lora_bias=False"),
    (r"modules_to_save|embed_tokens|\.wte\.", "a whole module, which is not served; train without modules_to_save"),
    (r"lora_[AB]\.[^.]+\.weight$", "an adapter with a name; save it with save_pretrained, which leaves names out"),
    (r"\.(hada|lokr|oft|ia3|vera|vblora|boft|road|ln_tuning)_", "another method than LoRA; train with LoraConfig"),
    (r"prompt_embeddings|prefix", "prompts that were trained, which are not served; train with LoraConfig"),
)


@dataclass(slots=True, frozen=True)
class Stored:
    """``start``, ``end``: its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def check_weights(config: AdapterConfig, file: BinaryIO, base: Base, *, max_rank: int = LARGEST_RANK) -> int:
    """The largest rank of the adapter's modules. Raises :class:`AdapterRefused`, whose text says what to do."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    tensors = read_header(file, size)
    for key, tensor in tensors.items():
        _check_own(key, tensor, base)
    modules = {_module(key) for key in tensors if not key.endswith(UNUSED)}
    if not modules:
        raise AdapterRefused(f"the adapter has no weights; {_AGAIN}")
    targets = {name: target_of(name, config, base.weights) for name in sorted(modules)}
    largest = max(_check_module(name, target, tensors, config, base, max_rank) for name, target in targets.items())
    require_all(targets.values(), base.experts)
    named = {target.name for target in targets.values()}
    wanted = [
        f"{module}.{name}"
        for module, own in base.weights.items()
        for name in config.wrapped(module, list(own))
        if f"{module}.{name}" not in named
    ]
    if lacking := [*wanted, *(name for name in base.linears if name not in modules and config.names(name))]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise AdapterRefused(
            f"adapter_config.json names {lacking[0]}{more}, and the weights have nothing for it; {_AGAIN}"
        )
    for key, tensor in tensors.items():
        _check_numbers(file, key, tensor)
    return largest


def read_header(file: BinaryIO, size: int) -> dict[str, Stored]:
    """What a file of ``size`` bytes holds. Refuses whatever safetensors would refuse, and headers without an end."""
    start = file.read(8)
    if len(start) < 8:
        raise AdapterRefused(f"adapter_model.safetensors has {size} bytes and no header; {_AGAIN}")
    length = int.from_bytes(start, "little")
    # The length of a header may begin with the same bytes.
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x04") and length > min(size - 8, MAX_HEADER):
        raise AdapterRefused("adapter_model.safetensors is a pickle of torch.save; save with safe_serialization=True")
    if length > size - 8:
        raise AdapterRefused(
            f"the header of adapter_model.safetensors is to have {length} bytes, and {size} are there; {_AGAIN}"
        )
    if length > MAX_HEADER:
        raise AdapterRefused(
            f"the header of adapter_model.safetensors has {length} bytes; at most {MAX_HEADER} are read: {_AGAIN}"
        )
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise AdapterRefused(f"adapter_model.safetensors has no header of JSON; {_AGAIN}")
    try:
        found = json.loads(raw, object_pairs_hook=_unique)
        "".join(found).encode()  # one half of a pair of surrogates is no text
    except (ValueError, RecursionError) as error:
        if isinstance(error, AdapterRefused):
            raise
        raise AdapterRefused(
            f"the header of adapter_model.safetensors is no JSON ({str(error)[:80]}); {_AGAIN}"
        ) from None
    found.pop("__metadata__", None)
    tensors = {str(key): _tensor(str(key), value, 8 + length) for key, value in found.items()}
    at = 8 + length
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            how = "overlap" if tensor.start < at else "leave a hole"
            raise AdapterRefused(f"the data of tensors {how} before {_short(key)}; {_AGAIN}")
        at = tensor.end
    if at != size:
        how = "is cut off" if at > size else "has bytes behind its data"
        raise AdapterRefused(f"adapter_model.safetensors {how}: {size} bytes instead of {at}; {_AGAIN}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise AdapterRefused(f"the header of adapter_model.safetensors names {_short(twice)} twice; {_AGAIN}")
    return found


def _tensor(key: str, value: Any, data: int) -> Stored:
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise AdapterRefused(f"{_short(key)} is {_short(dtype)}; save the adapter in float32, bfloat16 or float16")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise AdapterRefused(f"{_short(key)} has no shape and place in the header; {_AGAIN}")
    wanted = np.dtype(_DTYPES[dtype][0]).itemsize
    for size in shape:
        wanted *= size
    if offsets[1] - offsets[0] != wanted:
        raise AdapterRefused(
            f"{_short(key)} {shape} of {dtype} takes {wanted} bytes, and the header says {offsets}; {_AGAIN}"
        )
    return Stored(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _sizes(value: Any) -> TypeGuard[list[int]]:
    listed = isinstance(value, list) and len(value) <= _MOST_SIZES
    return listed and all(type(item) is int and 0 <= item < 1 << 40 for item in value)


def _check_own(key: str, tensor: Stored, base: Base) -> None:
    """Refuses weights of the base's own in another size: PEFT puts them into the place of the base's."""
    name = key[len(PREFIX) : -len(_OWN)]
    if key.endswith(_OWN) and (size := base.linears.get(name)) is not None and tensor.shape != size:
        raise AdapterRefused(
            f"the base model's {name} is {list(size)}, and the adapter was trained beside one of {list(tensor.shape)}; "
            "train without adding tokens to the vocabulary"
        )


def _module(key: str) -> str:
    for part in _PARTS:
        if key.endswith(part):
            if not key.startswith(PREFIX):
                raise AdapterRefused(f"{_short(key)} does not begin with {PREFIX}; {_AGAIN}")
            return key[len(PREFIX) : -len(part)]
    for mark, what in _OTHERS:
        if re.search(mark, key):
            raise AdapterRefused(f"{_short(key)} belongs to {what}")
    raise AdapterRefused(f"{_short(key)} is no A or B of a linear layer; train linear layers only, and {_AGAIN}")


def _check_module(
    name: str, target: Target, tensors: dict[str, Stored], config: AdapterConfig, base: Base, max_rank: int
) -> int:
    """Its rank."""
    shape = base.size(target.name)
    if shape is None:
        if kind := base.others.get(name):
            raise AdapterRefused(
                f"{name} is a {kind}; only linear layers that text goes through are served: take it out of "
                "target_modules, or put it into exclude_modules"
            )
        raise AdapterRefused(
            f"the base model has no {_short(name)}; the adapter was trained for another base, or on a class other than "
            "AutoModelForCausalLM"
        )
    both = [tensors.get(f"{PREFIX}{name}{part}") for part in _PARTS]
    if both[0] is None or both[1] is None:
        lacks = "lora_A" if both[0] is None else "lora_B"
        raise AdapterRefused(f"{name} has no {lacks}; {_AGAIN}")
    if not target.owned or target.expert >= 0:
        config.require_target(name)
    rank, (out, into) = config.rank_of(target.key), shape[-2:]
    count = shape[0] if len(shape) == 3 and target.expert < 0 else 1
    if target.half >= 0:
        out //= 2
    for tensor, part, wanted in ((both[0], "lora_A", (count * rank, into)), (both[1], "lora_B", (out, count * rank))):
        if tensor.shape == wanted:
            continue
        of_rank = len(tensor.shape) == 2 and tensor.shape[part == "lora_B"] != count * rank
        because = (
            f"adapter_config.json says rank {rank} for it; upload the configuration that was saved with these weights"
            if of_rank
            else f"the base model's layer is {[out, into]}; the adapter was trained for another base"
        )
        raise AdapterRefused(f"{part} of {name} is {list(tensor.shape)} instead of {list(wanted)}: {because}")
    if is_joined(target.name) and target.expert < 0 and any(is_joined(pattern) for pattern in config.rank_pattern):
        rank //= 2  # of gates, and of ups
    if rank > max_rank:
        raise AdapterRefused(f"{name} has rank {rank}; ranks up to {max_rank} are served here: train with a smaller r")
    return rank


def _check_numbers(file: BinaryIO, key: str, tensor: Stored) -> None:
    kind, exponent = _DTYPES[tensor.dtype]
    for piece in _pieces(file, tensor):
        bits = np.frombuffer(piece, kind)
        if bool(((bits & kind(exponent)) == kind(exponent)).any()):
            raise AdapterRefused(f"{_short(key)} has numbers that are infinite or no numbers; train the adapter again")


def _pieces(file: BinaryIO, tensor: Stored) -> Iterator[bytes]:
    file.seek(tensor.start)
    for at in range(tensor.start, tensor.end, _SLICE):
        yield file.read(min(_SLICE, tensor.end - at))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
