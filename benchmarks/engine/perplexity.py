"""What quantised weights cost in quality and bring in speed: perplexity on a text, and batch-1 decoding, side by side.

    python -m benchmarks perplexity MODEL_DIR --text FILE [--quantization none,int8,int4,fp8,fp8+kv,kv] [--json]

Perplexity is exp of the mean negative log-likelihood of each next token in windows of the text, computed by the forward
pass that serves. Use a text the model has not seen. Decoding alternates between the variants; figures are medians.
A perplexity that is no number, or beyond guessing, and an answer that is too short end it without figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks import Checks
from serve_app.engine.blocks import blocks_for
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.sampling_params import SamplingParams
from serve_app.text.tokenizer import Tokenizer

NEW = 48


@torch.inference_mode()
def perplexity(model: CausalModel, ids: list[int], window: int) -> float:
    """exp(mean negative log-likelihood) of ``ids`` in consecutive windows of ``window`` tokens."""
    count = blocks_for(window)
    kv = model.kv_shape.allocate(count + 1, model.device, slots=1)
    total, seen = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window + 1]
        tokens = part[:-1]
        request = Request("p", tokens, len(tokens), SamplingParams(), root=b"", blocks=list(range(1, count + 1)))
        request.state = 1
        logits = model.forward(build_batch([Scheduled(request, 0, len(tokens), len(tokens))], kv)).float()
        wanted = torch.tensor(part[1:], device=logits.device)
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        total, seen = total + float(losses), seen + len(tokens)
    return math.exp(total / seen)


def load_variant(path: Path, dtype: str, name: str, device: str = "cpu") -> CausalModel:
    """``none``, ``int8``, ``int4`` or ``fp8``; ``fp8+kv`` with a float8 cache, ``kv`` with nothing but that."""
    weights = "none" if name == "kv" else name.removesuffix("+kv")
    cache = "fp8" if "kv" in name else "auto"
    return load_causal_lm(path, dtype=dtype, device=device, quantization=weights, kv_cache_dtype=cache)


def decode_rate(model: CausalModel, prompt: list[int], salt: str, checks: Checks) -> float:
    """Tokens per second of one greedy request behind ``prompt``, its prefill left out."""
    engine = build_engine(model, EngineLimits(max_batch_tokens=512, max_num_seqs=1, max_model_len=512))
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    engine.add(Request("r", prompt, len(prompt), sampling, root=salt.encode()))
    engine.step()
    started, steps, tokens = time.perf_counter(), 0, 1
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
        steps += 1
    seconds = time.perf_counter() - started
    checks.equal("tokens of an answer", tokens, NEW)
    return steps / seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text the model has not seen")
    parser.add_argument(
        "--quantization", default="none,int8,int4", help="variants, the first is the one to compare with"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; float8 on a CPU is the same numbers in float32")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text, at most")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    names = options.quantization.split(",")
    ids = Tokenizer(options.model_dir).encode(options.text.read_text())[: options.tokens].tolist()
    if len(ids) < 2:
        parser.error(f"{options.text} has no text")
    models = {n: load_variant(options.model_dir, options.dtype, n, options.device) for n in names}
    found: dict[str, Any] = {n: {"perplexity": perplexity(m, ids, options.window)} for n, m in models.items()}
    rates: dict[str, list[float]] = {n: [] for n in names}
    checks = Checks()
    for name, entry in found.items():
        value, most = entry["perplexity"], models[name].vocab_size
        checks.that(f"perplexity of {name}", 1 <= value <= most, f"{value} of {most} tokens")
    for number in range(options.rounds):
        for name in names if number % 2 else reversed(names):
            rates[name].append(decode_rate(models[name], ids[:64], f"{number}", checks))
    checks.require()
    for name in names:
        entry = found[name]
        entry["perplexity_ratio"] = entry["perplexity"] / found[names[0]]["perplexity"]
        entry["decode_tokens_per_s"] = statistics.median(rates[name])
        entry["speed_ratio"] = entry["decode_tokens_per_s"] / statistics.median(rates[names[0]])
        entry["forward"] = models[name].report.get("fused_decoder", "transformers")
        print(
            f"{name:6} perplexity {entry['perplexity']:9.3f} ({entry['perplexity_ratio']:.4f}x)   decode "
            f"{entry['decode_tokens_per_s']:7.1f}/s ({entry['speed_ratio']:.2f}x)   {entry['forward']}"
        )
    if options.json:
        print(
            json.dumps(
                {"benchmark": "perplexity", "model": options.model_dir.name, "tokens": len(ids), "variants": found}
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
