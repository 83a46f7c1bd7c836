"""Sentences per second of the encoder path, against sentence-transformers and a plain transformers loop.

    python -m benchmarks encoder MODEL_DIR [--soak 20000] [--json]

All start from the same strings, tokenising included: random words, 1 to 256 tokens each, evenly spread over the
logarithm of the length. The plain loop pads batches in the order of arrival; ours is ``EncodeBatcher`` over
``load_encoder``. Rounds alternate between the variants, so a busy machine slows all of them; medians are reported.
``--sentence-transformers`` names the Python of an environment that has it, to measure it as well. Every vector must
have unit length and point where the others' do. ``share_of_products``: the time that the linears' products alone would
take, at the speed of one large product, of the time that a variant takes; nothing can be above 1. ``--soak`` sends that
many small requests afterwards and shows memory on the way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.checks import Checks
from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.text.tokenizer import Tokenizer

Run = Callable[[list[str]], np.ndarray]
LONGEST = 256
CLOSE = 1e-3


def sentences(tokenizer: Tokenizer, vocab_size: int, count: int, seed: int = 0) -> list[str]:
    """Random words whose lengths in tokens are log-uniform from 1 to 256."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, np.log(LONGEST - 2), count)).astype(int)
    return [tokenizer.decode(rng.integers(vocab_size // 4, vocab_size, max(1, n))) for n in lengths]


def ours(path: Path, tokenizer: Tokenizer, batcher: EncodeBatcher) -> Run:
    def run(texts: list[str]) -> np.ndarray:
        return batcher.submit([ids[:LONGEST] for ids in tokenizer.encode_batch(texts)]).result()

    return run


def plain_loop(path: Path, batch_size: int) -> Run:
    """What a first attempt looks like: AutoModel, right padding, masked mean, unit length."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    @torch.inference_mode()
    def run(texts: list[str]) -> np.ndarray:
        rows = []
        for start in range(0, len(texts), batch_size):
            group = texts[start : start + batch_size]
            batch = tokenizer(group, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"]
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            rows.append(torch.nn.functional.normalize(mean, dim=-1))
        return torch.cat(rows).float().numpy()

    return run


class SentenceTransformers:
    """sentence-transformers as its users call it, in a process of its own."""

    def __init__(self, python: str, path: Path, batch_size: int, threads: int) -> None:
        program = str(Path(__file__).with_name("sentences.py"))
        self._process = subprocess.Popen(
            [python, "-P", program, str(path), str(LONGEST), str(batch_size), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ""}, cwd="/",
        )  # fmt: skip

    def __call__(self, texts: list[str]) -> np.ndarray:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts).encode() + b"\n")
        self._process.stdin.flush()
        head = self._process.stdout.readline()
        if not head:
            raise SystemExit("no figures: sentence-transformers ended by itself")
        rows, columns = json.loads(head)
        data = self._process.stdout.read(rows * columns * 4)
        return np.frombuffer(data, np.float32).reshape(rows, columns)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def linear_numbers(path: Path) -> int:
    """Numbers in a checkpoint's linears: each is multiplied and added once for a token."""
    with safe_open(path / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name)


def product_speed(tries: int = 30) -> float:
    """Multiplications and additions a second of a product in float32 as large as a batch's; the fastest of several."""
    left, right, seconds = torch.randn(1024, 384), torch.randn(384, 1536), []
    for _ in range(tries):
        started = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - started)
    return left.numel() * right.shape[1] / min(seconds)


def compare(checks: Checks, name: str, vectors: np.ndarray, truth: np.ndarray) -> None:
    """Each text's vector beside that of the variant that was first."""
    if checks.equal(f"{name}, vectors", vectors.shape, truth.shape):
        for length, cosine in zip(np.linalg.norm(vectors, axis=1), (vectors * truth).sum(1), strict=True):
            right = abs(length - 1) < CLOSE and cosine > 1 - CLOSE
            checks.that(f"a vector of {name}", bool(right), f"length {length:.4f}, cosine {cosine:.4f}")


def soak(run: Run, texts: list[str], requests: int) -> dict[str, float]:
    """Resident memory in MB after each tenth of ``requests`` small requests."""
    rng, seen = np.random.default_rng(1), {}
    for number in range(1, requests + 1):
        run([texts[i] for i in rng.integers(0, len(texts), 2)])
        if number % max(1, requests // 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen[f"after_{number}"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    return seen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks encoder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--sentence-transformers", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of the others, in sentences (their default)")
    parser.add_argument("--soak", type=int, default=0, help="requests to send afterwards, for memory")
    parser.add_argument("--token-budget", type=int, default=1024, help="of ours, in tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = load_encoder(args.model_dir, "embeddings", pooling="mean")
    tokenizer = Tokenizer(args.model_dir)
    texts = sentences(tokenizer, model.vocab_size, args.sentences)
    batcher = EncodeBatcher(model, token_budget=args.token_budget)
    variants: dict[str, Run] = {
        "ours": ours(args.model_dir, tokenizer, batcher),
        "transformers_arrival_order": plain_loop(args.model_dir, args.batch_size),
    }
    peer = None
    if args.sentence_transformers:
        peer = SentenceTransformers(args.sentence_transformers, args.model_dir, args.batch_size, args.threads)
        variants["sentence_transformers"] = peer
    warm = {name: run(texts[: args.batch_size]) for name, run in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    checks, truth = Checks(), dict[str, np.ndarray]()
    speeds = []
    for number in range(args.rounds):
        speeds.append(product_speed())
        for name, run in variants.items():
            started = time.perf_counter()
            vectors = run(texts)
            seconds[name].append(time.perf_counter() - started)
            compare(checks, name, vectors, truth.setdefault("first", vectors))
        checks.require()
        taken = ", ".join(f"{name} {s[-1]:.2f} s" for name, s in seconds.items())
        print(f"round {number + 1}/{args.rounds}: {taken}", file=sys.stderr, flush=True)
    memory = soak(variants["ours"], texts, args.soak) if args.soak else {}
    batcher.close()
    stats = batcher.stats()
    if peer is not None:
        peer.close()
    rate = {name: round(len(texts) / statistics.median(taken), 1) for name, taken in seconds.items()}
    tokens = int(sum(map(len, tokenizer.encode_batch(texts))))
    products_s = linear_numbers(args.model_dir) * tokens / statistics.median(speeds)
    result = {
        "benchmark": "encoder",
        "sentences": len(texts),
        "tokens": tokens,
        "threads": args.threads,
        "rounds": args.rounds,
        "sentences_per_s": rate,
        "share_of_products": {n: round(products_s / statistics.median(taken), 3) for n, taken in seconds.items()},
        "ratio_to_transformers": round(rate["ours"] / rate["transformers_arrival_order"], 2),
        "least_cosine": {n: round(float((warm["ours"] * v).sum(1).min()), 6) for n, v in warm.items() if n != "ours"},
        "padding_share": round(1 - stats.tokens / stats.computed_tokens, 4),
        "flat": model.flat,
    }
    if "sentence_transformers" in rate:
        result["ratio_to_sentence_transformers"] = round(rate["ours"] / rate["sentence_transformers"], 2)
    if memory:
        result["resident_mb"] = memory
    for name, value in result.items():
        print(f"{name}: {value}")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
