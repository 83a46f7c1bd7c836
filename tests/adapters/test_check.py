"""What is refused of an adapter at upload, and that it says what to do."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.adapters.check import MAX_HEADER, PREFIX, check_weights
from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.adapters.shapes import Base

LAYERS = 3
BASE = Base(
    {f"model.layers.{i}.self_attn.{name}": (16, 8) for i in range(LAYERS) for name in ("q_proj", "v_proj")}
    | {"lm_head": (32, 8)},
    {"model.embed_tokens": "Embedding", "model.norm": "LlamaRMSNorm", "model.vision_tower.fc1": "linear of pictures"},
    "llama",
)
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
Tensors = dict[str, np.ndarray]
LAYER = f"{PREFIX}model.layers"
Q0 = f"{LAYER}.0.self_attn.q_proj"


def weights(rank: int = 4, dtype: Any = np.float32, layers: int = LAYERS) -> Tensors:
    found = {}
    for name in (name for name in BASE.linears if name != "lm_head" and int(name.split(".")[2]) < layers):
        out, into = BASE.linears[name]
        found[f"{PREFIX}{name}.lora_A.weight"] = np.full((rank, into), 0.5, dtype)
        found[f"{PREFIX}{name}.lora_B.weight"] = np.full((out, rank), 0.5, dtype)
    return found


def packed(tensors: Tensors, change: Callable[[dict[str, Any]], None] = lambda header: None) -> bytes:
    """As safetensors writes them; ``change`` may have the header say something else."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "float64": "F64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, data = 0, b""
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at, data = end, data + tensor.tobytes()
    change(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def checked(tmp_path: Path, data: bytes, config: dict[str, Any] | bytes = CONFIG, max_rank: int = 32) -> int:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(data)
    read = read_config(config if isinstance(config, bytes) else json.dumps(config).encode())
    with path.open("rb") as file:
        return check_weights(read, file, BASE, max_rank=max_rank)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_good_one_has_a_rank(tmp_path, dtype):
    assert checked(tmp_path, packed(weights(dtype=dtype))) == 4


GOOD: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "rank-stabilised": (weights(), {"use_rslora": True}),
    "of some layers": (weights(layers=1), {"layers_to_transform": [0], "layers_pattern": "layers"}),
    "of one layer": (weights(layers=1), {"layers_to_transform": 0}),
    "of one layer, by the first of two names": (
        weights(layers=1), {"layers_to_transform": 0, "layers_pattern": ["self_attn", "layers"]}
    ),
    "of layers that have whole names": (
        weights(layers=1),
        {"layers_to_transform": [7], "target_modules": [f"model.layers.0.self_attn.{x}_proj" for x in "qv"]},
    ),
    "begun by what the base has least of": (weights(), {"init_lora_weights": "mica"}),
    "by an expression": (weights(), {"target_modules": r".*\.(q|v)_proj"}),
    "all linears": (weights(), {"target_modules": "all-linear"}),
    "by the architecture": (weights(), {"target_modules": None}),
    "without some": (weights(layers=2), {"exclude_modules": r"model\.layers\.2\..*"}),
    "a pattern of ranks": (
        weights()
        | {f"{Q0}.lora_A.weight": np.ones((2, 8), np.float32), f"{Q0}.lora_B.weight": np.ones((16, 2), np.float32)},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    ),
    "with the output layer and its own weights": (
        weights()
        | {
            f"{PREFIX}lm_head.lora_A.weight": np.ones((4, 8), np.float32),
            f"{PREFIX}lm_head.lora_B.weight": np.ones((32, 4), np.float32),
            f"{PREFIX}lm_head.base_layer.weight": np.ones((32, 8), np.float32),
        },
        {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    ),
    "with what VeLoRA was trained by": (
        weights() | {f"{Q0}.lora_velora_embed": np.ones(2, np.float32)},
        {"velora_config": {"num_groups": 4}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_whatever_peft_makes_of_linears_is_taken(tmp_path, name):
    tensors, fields = GOOD[name]
    assert checked(tmp_path, packed(tensors), {**CONFIG, **fields}) == 4


def header(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Has the header say something else of one tensor."""

    def change(found: dict[str, Any]) -> None:
        found[f"{Q0}.lora_A.weight"] |= fields

    return change


def named(key: str) -> Tensors:
    return weights() | {key: np.ones((4, 8), np.float32)}


def without(key: str) -> Tensors:
    return {name: tensor for name, tensor in weights().items() if name != key}


def shaped(*shape: int, part: str = "lora_A") -> Tensors:
    return weights() | {f"{Q0}.{part}.weight": np.ones(shape, np.float32)}


def filled(value: float, dtype: Any = np.float32) -> Tensors:
    found = weights(dtype=dtype)
    found[f"{Q0}.lora_B.weight"][15, 3] = value
    return found


WHOLE = packed(weights())
LENGTH = int.from_bytes(WHOLE[:8], "little")
TWICE = WHOLE[8 : 8 + LENGTH].replace(b"layers.1.self_attn.q_proj.lora_A", b"layers.0.self_attn.q_proj.lora_A")
DEEP = b'{"a":' * 100_000
# Each of which was once compared with all others.
MANY = b"{%s}" % b",".join(b'"%d":0' % min(n, 299_999) for n in range(300_001))
LONE = packed(weights()).replace(b"__metadata__", b"\\udc80______")

# What is wrong: the file of weights, what the text says.
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no header"),
    "short": (b"\x08\0\0", "no header"),
    "a pickle": (b"PK\x03\x04" + bytes(100), "pickle"),
    "an old pickle": (b"\x80\x02" + bytes(100), "pickle"),
    "a text": (b"not a file of tensors, but a text", "header"),
    "a header longer than the file": ((1 << 40).to_bytes(8, "little") + b"{}", "1099511627776 bytes"),
    "a huge header": ((MAX_HEADER + 1).to_bytes(8, "little") + b"{" + b" " * MAX_HEADER, "at most"),
    "a header that is no object": (LENGTH.to_bytes(8, "little") + b"[" * LENGTH, "no header of JSON"),
    "a header that is no JSON": (LENGTH.to_bytes(8, "little") + b"{" * LENGTH, "no JSON"),
    "a deep header": (len(DEEP).to_bytes(8, "little") + DEEP, "no JSON"),
    "a header that is not UTF-8": ((4).to_bytes(8, "little") + b'{"\xff\xff', "no JSON"),
    "a name twice": (LENGTH.to_bytes(8, "little") + TWICE + WHOLE[8 + LENGTH :], "twice"),
    "a name twice among many": (len(MANY).to_bytes(8, "little") + MANY, "twice"),
    "a name that is no text": (LONE, "no JSON"),
    "cut off": (WHOLE[:-1], "is cut off"),
    "bytes behind its data": (WHOLE + b"\0", "behind its data"),
    "overlapping tensors": (packed(weights(), header(data_offsets=[32, 160])), "overlap|hole"),
    "a place outside": (packed(weights(), header(data_offsets=[10**9, 10**9 + 128])), "hole|cut off"),
    "a place that ends before it begins": (packed(weights(), header(data_offsets=[128, 0])), "bytes"),
    "a size that is none": (packed(weights(), header(shape=[-4, 8])), "no shape"),
    "a size that is no number": (packed(weights(), header(shape=["4", 8])), "no shape"),
    "no shape": (packed(weights(), header(shape=None)), "no shape"),
    "a shape of many sizes": (packed(weights(), header(shape=[1 << 39] * 400_000)), "no shape"),
    "a dtype that is no name": (packed(weights(), header(dtype=[])), "float32, bfloat16 or float16"),
    "a shape that does not fit": (packed(weights(), header(shape=[1 << 30, 1 << 30])), "takes"),
    "float64": (packed(weights(dtype=np.float64)), "float32, bfloat16 or float16"),
    "integers": (packed(weights(dtype=np.int64)), "float32, bfloat16 or float16"),
    "a dtype nobody knows": (packed(weights(), header(dtype="F8_E4M3")), "float32, bfloat16 or float16"),
    "nothing": (packed({}), "no weights"),
    "A without B": (packed(without(f"{Q0}.lora_B.weight")), "no lora_B"),
    "B without A": (packed(without(f"{Q0}.lora_A.weight")), "no lora_A"),
    "another rank than the configuration's": (packed(weights(rank=8)), "says rank 4"),
    "another rank in B": (packed(shaped(16, 2, part="lora_B")), "says rank 4"),
    "a base with other inputs": (packed(shaped(4, 12)), "trained for another base"),
    "a base with other outputs": (packed(shaped(24, 4, part="lora_B")), "trained for another base"),
    "three sizes": (packed(shaped(4, 8, 1)), "instead of"),
    "a size of 0": (packed(shaped(0, 8)), "says rank 4"),
    "a layer that the base does not have": (packed(named(f"{LAYER}.9.self_attn.q_proj.lora_A.weight")), "another base"),
    "a module that the base does not have": (packed(named(f"{LAYER}.0.mixer.lora_A.weight")), "another base"),
    "a norm": (packed(named(f"{PREFIX}model.norm.lora_A.weight")), "is a LlamaRMSNorm"),
    "an embedding as a linear": (packed(named(f"{PREFIX}model.embed_tokens.lora_A.weight")), "is a Embedding"),
    "an embedding": (packed(named(f"{PREFIX}model.embed_tokens.lora_embedding_A")), "embeddings"),
    "a whole embedding": (packed(named(f"{PREFIX}model.embed_tokens.weight")), "modules_to_save"),
    "a module that was saved": (packed(named(f"{PREFIX}lm_head.modules_to_save.weight")), "modules_to_save"),
    "DoRA": (packed(named(f"{Q0}.lora_magnitude_vector")), "use_dora=False"),
    "a bias": (packed(named(f"{Q0}.lora_B.bias")), "bias='none'"),
    "another method": (packed(named(f"{Q0}.hada_w1_a")), "LoraConfig"),
    "a prompt": (packed(named("prompt_embeddings")), "LoraConfig"),
    "an adapter's name in the names": (packed(named(f"{Q0}.lora_A.default.weight")), "save_pretrained"),
    "a linear that sees": (packed(named(f"{PREFIX}model.vision_tower.fc1.lora_A.weight")), "exclude_modules"),
    "a larger vocabulary": (packed(named(f"{PREFIX}lm_head.base_layer.weight")), "adding tokens"),
    "names of another kind": (packed(named("lora_unet_down_blocks_0.alpha")), "no A or B"),
    "names without PEFT's beginning": (packed(named("model.layers.0.mlp.up.lora_A.weight")), "does not begin"),
    "not a number": (packed(filled(float("nan"))), "infinite or no numbers"),
    "infinite": (packed(filled(float("-inf"))), "infinite or no numbers"),
    "infinite in float16": (packed(filled(float("inf"), np.float16)), "infinite or no numbers"),
    "not a number in bfloat16": (packed(filled(0x7FC1, np.uint16)), "infinite or no numbers"),
    "layers that are lacking": (packed(weights(layers=1)), "nothing for it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_are_refused_by_what_is_wrong_with_them(tmp_path, name):
    data, says = BAD[name]
    with pytest.raises(AdapterRefused, match=says):
        checked(tmp_path, data)


BAD_CONFIGS: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "no JSON": (b"{", "no JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "no JSON"),
    "a list": (b"[]", "no JSON object"),
    "too long": (b" " * (1 << 20) + b"{}", "shorten"),
    "deep": (b"[" * 100_000, "no JSON"),
    "no method": (b'{"r": 4}', "peft_type"),
    "another method": ({"peft_type": "LOHA"}, "peft_type"),
    "DoRA": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias"),
    "biases of LoRA": ({"lora_bias": True}, "lora_bias"),
    "whole modules": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "layers that are copied": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "a base that is changed": ({"init_lora_weights": "pissa"}, "pissa"),
    "rank 0": ({"r": 0}, "rank"),
    "a rank that is no number": ({"r": "8"}, "rank"),
    "a negative rank": ({"rank_pattern": {"q_proj": -1}}, "rank"),
    "a large rank": ({"r": 10**6}, "rank"),
    "an alpha that is no number": ({"lora_alpha": None}, "number"),
    "an infinite alpha": (b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999}', "number"),
    "an alpha beyond all numbers": ({"lora_alpha": 10**400}, "number"),
    "an alpha of a pattern beyond them": ({"alpha_pattern": {"q_proj": 10**400}}, "number"),
    "a pattern with flags": ({"rank_pattern": {"(?i)q_proj": 4}}, "no expression"),
    "a name that is no text": ({"rank_pattern": {"\udc80": 0}}, "no JSON"),
    "targets that are no names": ({"target_modules": {"a": 1}}, "target_modules"),
    "layers that are no numbers": ({"layers_to_transform": ["1"]}, "layers_to_transform"),
    "patterns that are no object": ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    "a pattern that never ends": ({"rank_pattern": {"(a+)+$": 4}}, "may take long"),
    "a pattern that is none": ({"alpha_pattern": {"(": 4}}, "no expression"),
    "modules that it does not name": ({"target_modules": ["q_proj"]}, "does not name"),
    "modules that it leaves out": ({"exclude_modules": ["v_proj"]}, "does not name"),
    "layers that it does not name": ({"layers_to_transform": [0, 1]}, "does not name"),
    "an expression for others": ({"target_modules": r".*k_proj"}, "does not name"),
    "more than the weights have": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "nothing for it"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations_are_refused_by_what_is_wrong_with_them(tmp_path, name):
    given, says = BAD_CONFIGS[name]
    with pytest.raises(AdapterRefused, match=says):
        checked(tmp_path, WHOLE, given if isinstance(given, bytes) else {**CONFIG, **given})


@pytest.mark.parametrize("begin", [b"PK", b"\x80\x04\x01"])
def test_a_header_may_have_a_length_that_begins_as_a_pickle_does(tmp_path, begin):
    data = packed(weights())
    length, wanted = int.from_bytes(data[:8], "little"), int.from_bytes(begin, "little")
    assert length < wanted
    padded = wanted.to_bytes(8, "little") + data[8 : 8 + length] + b" " * (wanted - length) + data[8 + length :]
    assert checked(tmp_path, padded) == 4


def test_a_rank_above_what_is_served_is_refused(tmp_path):
    assert checked(tmp_path, packed(weights(rank=64)), {**CONFIG, "r": 64}, max_rank=256) == 64
    with pytest.raises(AdapterRefused, match="ranks up to 32"):
        checked(tmp_path, packed(weights(rank=64)), {**CONFIG, "r": 64})


def test_an_expression_of_somebodys_is_never_tried_for_long(tmp_path):
    """One that could take for ever is left out, and the weights are checked without it."""
    assert checked(tmp_path, WHOLE, {**CONFIG, "target_modules": "(.*a?)*b(.*)+"}) == 4


def test_memory_is_bounded(tmp_path):
    big = Base({"model.up": (1 << 18, 256)}, {}, "")
    tensors = {
        f"{PREFIX}model.up.lora_A.weight": np.ones((32, 256), np.float32),
        f"{PREFIX}model.up.lora_B.weight": np.ones((1 << 18, 32), np.float32),
    }
    path = tmp_path / "weights"
    path.write_bytes(packed(tensors))
    del tensors
    config = read_config(json.dumps({"peft_type": "LORA", "r": 32, "lora_alpha": 1, "target_modules": ["up"]}).encode())
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            assert check_weights(config, file, big) == 32
        # A piece and what is compared of it, of a file of 32 MB.
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
