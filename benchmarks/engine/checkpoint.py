"""A checkpoint with random weights, for measuring speed where only shapes matter.

``python -m benchmarks checkpoint OUT_DIR {tiny,7m,80m,0.5b,1b}`` writes a Llama model in bfloat16, with the
tokenizer of pico-instruct beside it, since peers insist on one.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks import CHECKPOINTS

# hidden, intermediate, layers, heads, K/V heads, vocabulary
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 8192),
    "7m": (256, 768, 6, 8, 4, 8192),
    "80m": (768, 2048, 12, 12, 4, 8192),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1b": (2048, 8192, 16, 32, 8, 128256),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks checkpoint", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("size", choices=SIZES)
    arguments = parser.parse_args(argv)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[arguments.size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(arguments.out)
    finally:
        torch.set_default_dtype(before)
    pico = CHECKPOINTS / "pico-instruct"
    for name in TOKENIZER_FILES:
        shutil.copy(pico / name, arguments.out / name)
    print(f"{arguments.size} written to {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
