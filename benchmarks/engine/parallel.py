"""What a rank costs: one model on this machine's CPU in one process and divided among several.

    python -m benchmarks parallel [--divisions 1x1,2x1,1x2] [--batch 1,8] [--under-way 1,0] [--prompt 48] [--new 64]
                                  [--model FOLDER] [--json]
    python -m benchmarks parallel --divisions 1x1,4x1,4x1e,4x1d --experts 8 --chosen 2 --prompt 512 --new 8

A division is ranks that divide each layer x stages that divide the layers; of a mixture ``e`` behind it stands for
whole experts, with all rows on every rank, and ``d`` for rows that travel to them. Every rank has one thread, so that
cores are divided as GPUs would be. It tells the tokens per second of prompts and of answers; and of the answers' steps
the time, how many were under way at a time, and the shares that rank 0 spent in its own products, in collectives
(waiting for slower ranks included), in telling the others what to compute, and in everything else (scheduling,
sampling).
``sent_bytes`` is what rank 0 has sent for prompts and for answers, as the kernel counts it.
``busy_s`` are the seconds of its processor that each rank took, rank 0 with all that it does, for prompts and for
answers. They hardly change with what else the machine does, and tell how many tokens per second there would be if ranks
took turns and if none waited for another. Stages are measured with as many steps under way as ``--under-way`` says, 0
for as many as stages. The tokens of every division must be those of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.engine.sockets import tcp_bytes
from serve_app.parallel.life import BEAT_S
from serve_app.parallel.link import LinkAddress
from serve_app.sampling_params import SamplingParams
from serve_app.worker.follower import run_rank
from serve_app.worker.ranks import Ranks, begin_ranks, load_together
from serve_app.worker.spec import WorkerSpec


def child(spec: WorkerSpec, rank: int, address: LinkAddress) -> None:
    """A rank beside rank 0."""
    with contextlib.suppress(Exception):  # rank 0 is told
        run_rank(spec, rank, address, lambda step: None)
    os._exit(0)


def write_checkpoint(folder: Path, layers: int, hidden: int, experts: int, chosen: int) -> None:
    """A random model in the shape of Llama, or with ``experts`` of Mixtral, in float32: what it answers must not depend
    on how sums are divided.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if experts:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": chosen, "intermediate_size": 2 * hidden}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **mixture))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=4 * hidden))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.5 if "embed" in name else 1.2 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


@contextlib.contextmanager
def model_on(spec: WorkerSpec, path: Path) -> Iterator[tuple[Any, Ranks | None]]:
    """The model on as many ranks as ``spec`` says."""
    from serve_app.parallel.meeting import leave
    from serve_app.worker.loading import load_model

    def quiet(step: str) -> None:
        pass

    if spec.ranks == 1:
        yield load_model(spec, path, quiet), None
        return
    spawn = multiprocessing.get_context("spawn")

    def start(rank: int, address: LinkAddress) -> Any:
        process = spawn.Process(target=child, args=(spec, rank, address), daemon=True)
        process.start()
        return process

    ranks = begin_ranks(spec, start, "127.0.0.1", quiet)
    try:
        yield load_together(ranks, lambda: load_model(spec, path, quiet, ranks.group)), ranks
    finally:
        ranks.close()
        leave()
        for process in ranks.handles:
            process.join(30)


def busy(ranks: Ranks | None) -> list[float]:
    """Seconds of its processor that each rank has taken; the others tell of theirs each second."""
    own = time.thread_time()
    if ranks is None:
        return [own]
    time.sleep(1.5 * BEAT_S)
    return [own, *(state.get("busy_s", 0.0) for state in ranks.states()[1:])]


def taken(before: list[float], after: list[float], tokens: int) -> dict[str, Any]:
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return {
        "busy_s": [round(each, 2) for each in spent],
        "in_turns_tokens_s": round(tokens / sum(spent), 1),
        "at_once_tokens_s": round(tokens / max(spent), 1),
    }


def measure(
    model: Any, ranks: Ranks | None, batch: int, prompt: int, new: int, under_way: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Of ``batch`` requests with ``prompt`` tokens that answer ``new`` each: a step's time and where it went; the
    tokens.
    """
    from serve_app.engine.build import EngineLimits, build_engine
    from serve_app.engine.request import Request

    limits = EngineLimits(
        max_num_seqs=batch, max_model_len=prompt + new + 32, graphs=False, overlap=False, under_way=under_way,
        kv_cache_bytes=model.kv_shape.block_bytes * (2 + batch * (2 + (prompt + new) // 32)),
    )  # fmt: skip
    engine = build_engine(model, limits)
    for index in range(batch):
        ids = [(7 * i * (index + 1) + 3) % 4000 + 2 for i in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.add(Request(str(index), ids, prompt, params, root=bytes([index])))
    answers: dict[str, list[int]] = {str(index): [] for index in range(batch)}

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] += output.token_ids

    at_first, wired, began = busy(ranks), tcp_bytes()[0], time.perf_counter()
    while not all(answers.values()):
        step()
    prompts_s = time.perf_counter() - began
    computed, rewired = busy(ranks), tcp_bytes()[0]
    forward = ranks.forward if ranks is not None else None
    together = ranks.group.waiting.total_s if ranks is not None else 0.0
    passes, telling = (forward.seconds, forward.telling_s) if forward is not None else (0.0, 0.0)
    steps, under = engine.stats.steps, engine.stats.under_way
    left = batch * new - sum(len(answer) for answer in answers.values())
    began = time.perf_counter()
    while engine.has_work:
        step()
    seconds, steps = time.perf_counter() - began, engine.stats.steps - steps
    found: dict[str, Any] = {
        "prompt_tokens_s": round(batch * prompt / prompts_s, 1),
        "step_ms": round(1e3 * seconds / steps, 3),
        "tokens_s": round(left / seconds, 1),
    }
    if ranks is not None and forward is not None:
        found["under_way"] = round((engine.stats.under_way - under) / steps, 2)
        found["prompts"] = taken(at_first, computed, batch * prompt)
        found["answers"] = taken(computed, busy(ranks), left)
        found["prompts"]["sent_bytes"] = rewired - wired
        found["answers"]["sent_bytes"] = tcp_bytes()[0] - rewired
        parts = {"collectives": ranks.group.waiting.total_s - together, "telling": forward.telling_s - telling}
        parts["products"] = forward.seconds - passes - sum(parts.values())
        parts["engine"] = seconds - (forward.seconds - passes)
        found["share"] = {name: round(part / seconds, 3) for name, part in parts.items()}
    return found, [answers[str(index)] for index in range(batch)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--divisions", default="1x1,2x1,1x2", help="ranks of a layer x stages, the first is the truth")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--under-way", default="1,0", help="steps of a pipeline at a time; 0: as many as stages")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture; 0: none")
    parser.add_argument("--chosen", type=int, default=2, help="of these for each token")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of a random one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    checks, found = Checks(), {}
    right: dict[int, list[list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="parallel-") as scratch:
        path = options.model or Path(scratch)
        if options.model is None:
            write_checkpoint(path, options.layers, options.hidden, options.experts, options.chosen)
        for division in options.divisions.split(","):
            tensor, pipeline = (int(n) for n in division.rstrip("ed").split("x"))
            whole = tensor if division[-1] in "ed" else 1
            spec = WorkerSpec(
                "@cf/benchmarks/parallel", "decode", {"path": str(path)}, "", "", cpu_threads=1, dtype=options.dtype,
                tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=whole,
                expert_dispatch="always" if division.endswith("d") else "never",
            )  # fmt: skip
            import torch

            torch.set_num_threads(1)
            with model_on(spec, path) as (model, ranks):
                for batch in (int(b) for b in options.batch.split(",")):
                    for depth in [int(d) or pipeline for d in options.under_way.split(",")] if pipeline > 1 else [1]:
                        measured, answers = measure(model, ranks, batch, options.prompt, options.new, depth)
                        found.setdefault(f"{division}, {depth} under way", {})[batch] = measured
                        checks.equal(f"{division}, batch {batch}", answers, right.setdefault(batch, answers))
                        print(f"{division:>6} batch {batch:>3}, {depth} under way  {measured}", flush=True)
    answered = checks.require()
    if options.json:
        print(json.dumps({"divisions": found, "checked": answered}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
