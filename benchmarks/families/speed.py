"""What families without the fused decoder give beside ``generate``: decoded tokens per second at batch 1 and 8."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.architectures import COMPLETED, Architecture, architectures
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.kv.keys import root_key
from serve_app.models.load import load_causal_lm
from serve_app.models.miniature import Sizes, build, scale_down
from serve_app.sampling_params import SamplingParams

# Families that keep transformers' forward, one of each kind: norms, gates, mixtures, sinks, windows, older code.
CHOSEN = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Cohere2ForCausalLM", "GPT2LMHeadModel",
    "GPTNeoXForCausalLM", "OPTForCausalLM", "Starcoder2ForCausalLM", "StableLmForCausalLM", "NemotronForCausalLM",
    "FalconForCausalLM", "GPTJForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM",
    "DeepseekV3ForCausalLM", "Ministral3ForCausalLM",
)  # fmt: skip
# A few ten million weights in bfloat16: enough that a step is not all dispatch, little enough for any machine.
SIZES = Sizes(
    layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, inner=1536, vocab=8192, experts=8, window=256, chunk=256,
    original=512, context=1024,
)  # fmt: skip
PROMPT, NEW, ROUNDS = 128, 48, 3


@dataclass(slots=True)
class Speed:
    """Medians in tokens per second."""

    architecture: str
    served: str
    batch: int
    ours: float
    generate: float

    @property
    def ratio(self) -> float:
        return self.ours / self.generate


def measure(only: str, out: Path | None) -> int:
    """Prints a line per family and batch; returns 1 if one is below 1.5 times ``generate``."""
    wanted = architectures(("text-generation",), only)
    found: list[Speed] = []
    for architecture in wanted:
        if architecture.variant or (not only and architecture.name not in CHOSEN):
            continue
        for speed in _compare(architecture):
            found.append(speed)
            line = f"{speed.ours:8.0f} tok/s  generate {speed.generate:8.0f}  {speed.ratio:5.2f}x"
            print(f"{speed.architecture:32} {speed.served:22} batch {speed.batch}: {line}", flush=True)
    if out is not None:
        out.write_text(
            json.dumps([{"architecture": s.architecture, "batch": s.batch, "ratio": s.ratio} for s in found])
        )
    return 1 if any(s.ratio < 1.5 for s in found) else 0


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
        limits = EngineLimits(kv_cache_bytes=200 * model.kv_shape.block_bytes, max_model_len=1024)
        engine = build_engine(model, limits)
        own, theirs = [], []
        for _ in range(ROUNDS):  # in turn, so that what else the machine does hits both
            prompts = [[rng.randrange(3, SIZES.vocab) for _ in range(PROMPT)] for _ in range(batch)]
            own.append(_rate(batch, partial(_run, engine, prompts)))
            theirs.append(_rate(batch, partial(_generate, reference, prompts)))
        speeds.append(Speed(architecture.name, served, batch, statistics.median(own), statistics.median(theirs)))
    return speeds


def _rate(batch: int, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return batch * NEW / (time.perf_counter() - started)


def _run(engine: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    root = root_key("families", "bfloat16", "layout", "", b"tenant")
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
