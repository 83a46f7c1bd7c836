"""Sentences per second of the encoder path against a plain transformers loop.

    python -m benchmarks.encoder MODEL_DIR [--json]

The plain loop pads batches in the order of arrival; ours is ``EncodeBatcher`` over ``load_encoder``. Texts
are random ids with log-normal lengths, the same for all. Rounds alternate between the variants, so a busy
machine slows all of them; medians are reported, and the last line is one JSON object.
sentence-transformers joins where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from serve_app.engine.encode import EncodeBatcher
from serve_app.models.encoder import load_encoder

Run = Callable[[list[np.ndarray]], np.ndarray]


def sentences(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    """Token ids with a median of about 20 tokens and a long tail, as in sentence corpora."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.0, 0.6, count).astype(int), 4, longest)
    return [rng.integers(vocab_size // 2, vocab_size, n).astype(np.int32) for n in lengths]


def plain_loop(path: Path, batch_size: int) -> Run:
    """What a first attempt looks like: AutoModel, right padding, masked mean, unit length."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True).eval()

    @torch.inference_mode()
    def run(texts: list[np.ndarray]) -> np.ndarray:
        rows = []
        for start in range(0, len(texts), batch_size):
            group = texts[start : start + batch_size]
            ids = torch.zeros(len(group), max(map(len, group)), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, text in enumerate(group):
                ids[row, : len(text)] = torch.from_numpy(text)
                mask[row, : len(text)] = 1
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            rows.append(torch.nn.functional.normalize(mean, dim=-1))
        return torch.cat(rows).float().numpy()

    return run


def sentence_transformers_loop(path: Path, batch_size: int) -> Run | None:
    """sentence-transformers' own sorting and pooling on the same ids, or None where it is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
        from transformers import AutoTokenizer
    except ImportError:
        return None
    model = SentenceTransformer(str(path), local_files_only=True, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    def run(texts: list[np.ndarray]) -> np.ndarray:
        return model.encode([tokenizer.decode(t) for t in texts], batch_size=batch_size, show_progress_bar=False)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of the plain loop, in sentences")
    parser.add_argument("--token-budget", type=int, default=1024, help="of ours, in tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_encoder(args.model_dir, "embeddings", pooling="mean")
    texts = sentences(args.sentences, model.vocab_size, min(model.max_length, 256))
    batcher = EncodeBatcher(model, token_budget=args.token_budget)
    variants: dict[str, Run] = {
        "ours": lambda texts: batcher.submit(texts).result(),
        "transformers_arrival_order": plain_loop(args.model_dir, args.batch_size),
    }
    if extra := sentence_transformers_loop(args.model_dir, args.batch_size):
        variants["sentence_transformers"] = extra
    warm = {name: run(texts[: args.batch_size]) for name, run in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(args.rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            run(texts)
            seconds[name].append(time.perf_counter() - started)
        if not args.json:
            taken = ", ".join(f"{name} {s[-1]:.2f} s" for name, s in seconds.items())
            print(f"round {number + 1}/{args.rounds}: {taken}")
    batcher.close()
    rate = {name: round(len(texts) / statistics.median(taken), 1) for name, taken in seconds.items()}
    result = {
        "benchmark": "encoder",
        "sentences": len(texts),
        "tokens": int(sum(map(len, texts))),
        "threads": args.threads,
        "rounds": args.rounds,
        "sentences_per_s": rate,
        "ratio_to_transformers": round(rate["ours"] / rate["transformers_arrival_order"], 2),
        "max_difference": float(np.abs(warm["ours"] - warm["transformers_arrival_order"]).max()),
        "padding_share": round(batcher.stats().padding_share, 4),
        "flat": model.flat,
    }
    if "sentence_transformers" in rate:
        result["ratio_to_sentence_transformers"] = round(rate["ours"] / rate["sentence_transformers"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
