"""What families without the fused decoder give beside ``generate``: decoded tokens per second at batch 1 and 8."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.architectures import COMPLETED, Architecture, architectures
from benchmarks.families.generation import STATE_SLOTS
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.kv.keys import root_key
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.miniature import Sizes, build, scale_down
from serve_app.sampling_params import SamplingParams

# Families that keep transformers' forward, one of each kind: norms, gates, mixtures, sinks, windows, older code.
CHOSEN = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Cohere2ForCausalLM", "GPT2LMHeadModel",
    "GPTNeoXForCausalLM", "OPTForCausalLM", "Starcoder2ForCausalLM", "StableLmForCausalLM", "NemotronForCausalLM",
    "FalconForCausalLM", "GPTJForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM",
    "DeepseekV3ForCausalLM", "Ministral3ForCausalLM", "Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM",
    "NemotronHForCausalLM", "Lfm2ForCausalLM",
)  # fmt: skip
# A few ten million weights in bfloat16: enough that a step is not all dispatch, little enough for any machine.
SIZES = Sizes(
    layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, inner=1536, vocab=8192, experts=8, window=256, chunk=256,
    original=512, context=1024,
)  # fmt: skip
PROMPT, NEW, ROUNDS = 128, 48, 3
LEAST = 1.5


@dataclass(slots=True)
class Speed:
    """Medians in tokens per second."""

    architecture: str
    served: str
    batch: int
    ours: float
    generate: float
    ratio: float  # the median of those of each round, in which both ran one after the other


def measure(only: str, out: Path | None) -> int:
    """Prints a line per family and batch, and at the end one JSON object; returns 1 if a family on transformers'
    forward is below :data:`LEAST` times ``generate``, or does not load."""
    families: dict[str, dict[str, Any]] = {}
    for architecture in architectures(("text-generation",), only):
        if architecture.variant or (not only and architecture.name not in CHOSEN):
            continue
        try:
            speeds = _compare(architecture)
        except Exception as error:  # one family that fails is a line and not the end
            families[architecture.name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(f"{architecture.name:32} failed: {error}"[:200], file=sys.stderr, flush=True)
            continue
        families[architecture.name] = {
            "served": speeds[0].served,
            "ratio": {str(s.batch): round(s.ratio, 2) for s in speeds},
            "tokens_per_s": {str(s.batch): round(s.ours, 1) for s in speeds},
        }
        for speed in speeds:
            line = f"{speed.ours:8.0f} tok/s  generate {speed.generate:8.0f}  {speed.ratio:5.2f}x"
            print(f"{speed.architecture:32} {speed.served:22} batch {speed.batch}: {line}", file=sys.stderr, flush=True)
    found = summary(families)
    print(json.dumps(found))
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    return 1 if found["missed"] or found["failed"] else 0


def summary(families: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``least``: the lowest ratio of all families on transformers' forward; ``missed``: those below :data:`LEAST`."""
    plain = {name: f["ratio"] for name, f in families.items() if f.get("served") == "transformers' forward"}
    return {
        "benchmark": "families",
        "least": min((ratio for ratios in plain.values() for ratio in ratios.values()), default=None),
        "missed": sorted(name for name, ratios in plain.items() if min(ratios.values()) < LEAST),
        "failed": sorted(name for name, f in families.items() if "failed" in f),
        "families": families,
    }


def _compare(architecture: Architecture) -> list[Speed]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, architecture.name)
    config = CONFIG_MAPPING[architecture.model_type](**COMPLETED.get(architecture.model_type, {}))
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        path = Path(folder)
        build(model_class, scale_down(config, SIZES, eos_token_id=None)).to(torch.bfloat16).save_pretrained(path)
        model = load_causal_lm(path, dtype="bfloat16")
        reference = model_class.from_pretrained(path, dtype=torch.bfloat16).eval()
    served = "fast layer" if "fused_decoder" in model.report else "transformers' forward"
    rng = random.Random(0)
    speeds = []
    for batch in (1, 8):
        limits = EngineLimits(
            kv_cache_bytes=200 * model.kv_shape.block_bytes,
            max_model_len=1024,
            state_slots=STATE_SLOTS if model.kv_shape.states.parts else 0,
        )
        engine = build_engine(model, limits)
        own, theirs = [], []
        for _ in range(ROUNDS):  # in turn, so that what else the machine does hits both
            prompts = [[rng.randrange(3, SIZES.vocab) for _ in range(PROMPT)] for _ in range(batch)]
            own.append(_rate(batch, partial(_run, engine, prompts)))
            theirs.append(_rate(batch, partial(_generate, reference, prompts)))
        ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        rates = statistics.median(own), statistics.median(theirs)
        speeds.append(Speed(architecture.name, served, batch, *rates, ratio))
    return speeds


def _rate(batch: int, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return batch * NEW / (time.perf_counter() - started)


def _run(engine: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    root = root_key(b"families", "", b"tenant")
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, len(prompt), params, root))
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def _generate(reference: Any, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts)
    reference.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": NEW, "max_new_tokens": NEW}
    reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
