"""A checkpoint of Qwen3-MoE as a GGUF file: ``python -P gguf_file.py MODEL_DIR OUT {bf16,q8_0,q4_0}``.

Runs in llama.cpp's own environment, hence only the standard library, numpy and ``gguf``. Norms and routers stay
float32, as llama.cpp's own converter leaves them; all other weights get the format. There is no vocabulary: prompts
are token ids.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Of each layer, without its experts.
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


class Weights:
    """The tensors of one safetensors file in bfloat16, as float32."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._tensors = json.loads(file.read(length))
        self._data = np.memmap(path, np.uint8, "r", offset=8 + length)

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        if tensor["dtype"] != "BF16":
            raise SystemExit(f"{name} is {tensor['dtype']}; write the checkpoint in bfloat16")
        start, end = tensor["data_offsets"]
        bits = self._data[start:end].view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor["shape"])


def write(folder: Path, out: Path, kind: str) -> None:
    import gguf

    config = json.loads((folder / "config.json").read_text())
    weights = Weights(folder / "model.safetensors")
    experts = config.get("num_experts") or config["num_local_experts"]
    part = out.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(part, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    form = gguf.GGMLQuantizationType[kind.upper()]

    def add(name: str, values: np.ndarray) -> None:
        plain = values.ndim == 1 or "ffn_gate_inp" in name
        kept = gguf.GGMLQuantizationType.F32 if plain else form
        writer.add_tensor(name + ".weight", gguf.quants.quantize(values, kept), raw_dtype=kept)

    add("token_embd", weights["model.embed_tokens.weight"])
    add("output_norm", weights["model.norm.weight"])
    add("output", weights["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for theirs, name in TENSORS.items():
            add(f"blk.{layer}.{name}", weights[f"{at}{theirs}.weight"])
        for theirs, name in EXPERTS.items():
            every = [weights[f"{at}mlp.experts.{e}.{theirs}.weight"] for e in range(experts)]
            add(f"blk.{layer}.{name}", np.stack(every))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
