"""Mixtures of experts on this machine's CPU: our engine, and peers where they are given, on random checkpoints.

    python -m benchmarks moe [--sizes 0.27b,1b] [--vllm PYTHON] [--batch 1,8,32] [--rounds 3] [--work FOLDER] [--json]
    python -m benchmarks moe --peers llama.cpp [--llama PYTHON] [--batch ""] [--prompts 512,2048]

Two models in the shape of Qwen3-MoE and in bfloat16: 12 layers with 32 experts of which a token chooses 4, and 16
layers with 64 of which it chooses 8. Prompts, checks and rounds are those of ``benchmarks engine``. The roofline counts
what a decode step needs: the weights that are no experts', the experts that its rows have chosen, keys and values.
``--peers llama.cpp`` compares prompts alone with llama.cpp, at 16, 8 and 4 bits (``llama-cpp-python`` and ``gguf`` in
the environment of ``--llama``); it is left out, with the reason, where these are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS
from benchmarks.engine import prefill
from benchmarks.engine.checkpoint import TOKENIZER_FILES
from benchmarks.engine.engine import compare


@dataclass(slots=True, frozen=True)
class Shape:
    """Of a model; ``inner`` is one expert's width."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    experts: int
    chosen: int
    vocab: int = 32768


SHAPES = {
    "tiny": Shape(2, 64, 32, 4, 2, 8, 2, vocab=8192),
    "0.27b": Shape(12, 512, 384, 8, 2, 32, 4, vocab=65536),
    "1b": Shape(16, 1024, 320, 16, 4, 64, 8),
}


def write_checkpoint(name: str, folder: Path) -> None:
    """A checkpoint with random weights, and the tokenizer of pico-instruct, since peers insist on one."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = SHAPES[name]
    config = Qwen3MoeConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, intermediate_size=3 * shape.hidden,
        moe_intermediate_size=shape.inner, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=64, num_experts=shape.experts, num_experts_per_tok=shape.chosen, norm_topk_prob=True,
        vocab_size=shape.vocab, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    # At its initial values a router tells experts hardly apart, and rounding would choose.
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            torch.nn.init.normal_(module.weight, std=shape.hidden**-0.5)
    model.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(CHECKPOINTS / "pico-instruct" / file, folder / file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks moe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0.27b,1b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--peers", default="", choices=["", "llama.cpp"], help="compare prompts alone with it")
    parser.add_argument("--llama", metavar="PYTHON", default=sys.executable, help="interpreter that has llama.cpp")
    parser.add_argument("--prompts", default=",".join(map(str, prefill.LENGTHS)), help="tokens of those prompts")
    parser.add_argument("--transformers", action="store_true", help="measure generate as well")
    parser.add_argument("--batch", default="1,8,32", help="empty: no generation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, help="keep the checkpoints here, and find them again")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    options.quantization, options.no_mixed, options.no_transformers = "none", True, not options.transformers
    batches = [int(b) for b in options.batch.split(",") if b]
    why = prefill.missing(options.llama) if options.peers else None
    if why:
        print(f"llama.cpp is left out: {why}", file=sys.stderr)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moe-") as scratch:
        for name in options.sizes.split(","):
            folder = (options.work or Path(scratch)) / name
            if not (folder / "config.json").is_file():
                write_checkpoint(name, folder)
            found[name] = compare(folder, batches, options) if batches else {}
            if options.peers and not why:
                lengths = [int(length) for length in options.prompts.split(",")]
                prompts = prefill.compare(
                    folder, folder.parent, options.llama, lengths, options.rounds, options.threads
                )
                prefill.report(name, prompts)
                found[name]["prefill"] = prompts
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
