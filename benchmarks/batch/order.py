"""Prompt tokens that an engine with a bounded cache computes, in the file's order and in that of the intake."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS
from benchmarks.batch.files import shared_prefixes
from benchmarks.checks import Checks
from benchmarks.serving import stack

MODEL = "@cf/pico/pico-instruct"
# Blocks of 32 tokens that the engine has, of which its running requests need some 80, and how many run at once.
BLOCKS = 256
AT_ONCE = 8
LEAST_GAIN = 1.5


def prefix_order(count: int, checks: Checks) -> dict[str, Any]:
    """Figures for a file of ``count`` requests of mixed shared prefixes."""
    from serve_app.models.load import load_causal_lm

    lines = list(shared_prefixes(MODEL, count))
    prompts = [_tokens(json.loads(one)["body"]) for one in lines]
    ordered = _order(lines)
    checks.equal("requests in shards, each once", sorted(ordered), list(range(count)))
    checks.require()
    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as scratch:
        model = load_causal_lm(stack.write_checkpoint(Path(scratch) / "model", "tiny"), dtype="float32")
    in_file, by_file = _computed(model, prompts, range(count))
    in_ours, by_ours = _computed(model, prompts, ordered)
    checks.equal("answers in both orders", by_ours, by_file)
    checks.equal("answers", sum(map(len, by_file.values())), 4 * count)
    return {
        "requests": count,
        "prompt_tokens": sum(map(len, prompts)),
        "computed_in_file_order": in_file,
        "computed_in_our_order": in_ours,
        "gain": round(in_file / in_ours, 2),
    }


def _order(lines: list[bytes]) -> list[int]:
    """The numbers of the lines as the intake's shards have them."""
    from serve_app.api.types import ModelLimits
    from serve_app.batch.check import Known
    from serve_app.batch.intake import ShardPlan
    from serve_app.batch.prepare import prepare
    from serve_app.catalog.load import load_catalog
    from serve_app.gateway.models import Models
    from serve_app.gateway.settings import GatewaySettings
    from serve_app.state.blobs.files import DirectoryFiles
    from serve_app.state.callers.accounts import Caller
    from serve_app.state.deferred.batches import Batch, unpack

    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as scratch:
        home = Path(scratch)
        models = Models(load_catalog(home), "local", (), home)
        settings = GatewaySettings("local", (), "s", str(home), "local")
        known = Known(models.named, lambda model: ModelLimits(), lambda caller, model: None, settings, len(lines))
        files = DirectoryFiles(home / "files")
        files.put("files/in", b"\n".join(lines))
        about = json.dumps({"endpoint": "/v1/chat/completions"}).encode()
        plan = prepare(
            files, Batch("ab" * 16, "openai", Caller("local"), 0, 9, 9, about=about, input="files/in"), known
        )
        assert isinstance(plan, ShardPlan), plan
        return [request.number for shard in plan.shards for request in unpack(files.get(shard.blob))]


def _tokens(body: dict[str, Any]) -> list[int]:
    from serve_app.api.openai.read import parse_chat
    from serve_app.api.types import ModelLimits
    from serve_app.text.prompt import prompt_ids

    return prompt_ids(_tokenizer(), parse_chat(body, ModelLimits())).tolist()


@cache
def _tokenizer() -> Any:
    from serve_app.text.tokenizer import Tokenizer

    return Tokenizer(CHECKPOINTS / "pico-instruct")


def _computed(model: Any, prompts: list[list[int]], order: Sequence[int]) -> tuple[int, dict[int, list[int]]]:
    """Prompt tokens that were computed, and each request's answer, where they are run in this order."""
    from serve_app.engine.build import EngineLimits, build_engine
    from serve_app.engine.request import Request
    from serve_app.sampling_params import SamplingParams

    limits = EngineLimits(BLOCKS * model.kv_shape.block_bytes, 512, AT_ONCE, 2048)
    engine = build_engine(model, limits)
    waiting, answers = list(reversed(order)), {number: [] for number in order}
    while waiting or engine.has_work:
        scheduler = engine.scheduler
        while waiting and len(scheduler.running) + len(scheduler.waiting) < AT_ONCE + 2:
            number = waiting.pop()
            sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            prompt = prompts[number]
            engine.add(Request(str(number), list(prompt), len(prompt), sampling, b"order", share=0.05))
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return engine.stats.prompt_tokens, answers
