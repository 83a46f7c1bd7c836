"""The engine on one GPU, against transformers and against what the device can do at most. Needs no Ray.

    python -m benchmarks gpu [--quick] [--shapes llama-8b,qwen3-0.6b] [--json]

Writes checkpoints with random weights in the shapes of Llama-3.1-8B and Qwen3-0.6B (once, into --work), then measures,
each side in a process of its own: parity of the greedy tokens of pico-instruct with the CPU and with ``generate``; one
stream; 64 requests together; a saturated mix of lengths like ShareGPT's; prefill; time to first token of 32 requests at
once; start-up by stage. Rooflines are measured in the same run: bytes read per second (the better of a copy and a
matrix-vector product) and bfloat16 products per second of one large matrix product. The results are
written to benchmarks/results/. ``--device cpu --shapes tiny`` runs the same on a CPU, to try the script out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.checks import Checks
from benchmarks.gpu.shapes import experts_of

# On one H200 with the 8B shape in bfloat16.
TARGETS = {"single": 240.0, "saturated": 16000.0, "prefill share": 0.6, "ttft p50 ms": 150.0, "weights s": 6.0,
           "generate_batch": 3.0}  # fmt: skip


def side(name: str, device: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Runs one side in a fresh process (on a CPU in this one); ``{"error"}`` where it failed, so that the others are
    still reported.
    """
    print(f"  {folder.name if name in ('ours', 'transformers') else ''} {name} ...", file=sys.stderr, flush=True)
    if device == "cpu":
        from benchmarks.gpu.sides import SIDES

        return SIDES[name](device, folder, options)
    command = [sys.executable, "-m", "benchmarks.gpu.sides", name, device, str(folder), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def plan(device: str, quick: bool) -> dict[str, Any]:
    """How much is measured."""
    if device == "cpu":
        return {"context": 2048, "batch_tokens": 512, "seqs": 8, "rounds": 1, "single_new": 8, "together_new": 6,
                "mixed": 6, "prefill": [2, 256]}  # fmt: skip
    return {"context": 4096, "batch_tokens": 8192, "seqs": 256, "rounds": 2 if quick else 5,
            "single_new": 128 if quick else 512, "together_new": 128, "mixed": 384 if quick else 1024,
            "prefill": [8, 2048]}  # fmt: skip


def parameters_of(path: Path) -> tuple[int, int, int, int]:
    """Parameters outside of the embedding and the head that a row is multiplied with, layers, heads and head size."""
    config = json.loads((path / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    attention = hidden * dim * (2 * heads + 2 * config["num_key_value_heads"])
    if experts := experts_of(config):
        inner = config["num_experts_per_tok"] * config["moe_intermediate_size"]
        attention += experts * hidden  # the router
    else:
        inner = config["intermediate_size"]
    return layers * (attention + 3 * hidden * inner), layers, heads, dim


def judge(found: dict[str, Any], path: Path, machine: dict[str, Any]) -> dict[str, float]:
    """The shares of the rooflines and the ratios to transformers."""
    mine, theirs = found["ours"], found["transformers"]
    if "error" in mine:
        return {}
    # Weights, and keys and values of the prompt and half of the answer.
    moved = mine["weight_bytes"] + mine["kv_token_bytes"] * 400
    best_step = moved / machine["read_gb_s"] / 1e9
    inner, layers, heads, dim = parameters_of(path)
    length = mine["prefill"]["length"]
    # Two operations per parameter and token; scores and values over half of the prompt on average (it is causal).
    per_token = 2 * inner + 2 * 2 * layers * heads * dim * length / 2
    result = {
        "single_share_of_bandwidth": best_step * 1e3 / mine["single"]["step_ms"],
        "prefill_share_of_matrix_rate": mine["prefill"]["tokens_per_s"] * per_token / machine["matrix_tflops"] / 1e12,
    }
    if "error" not in theirs:
        result["single_vs_generate"] = mine["single"]["tokens_per_s"] / theirs["single"]["tokens_per_s"]
        result["together_vs_generate"] = mine["together"]["tokens_per_s"] / theirs["generate"]["tokens_per_s"]
        if "tokens_per_s" in theirs["generate_batch"]:
            peer = theirs["generate_batch"]["tokens_per_s"]
            result["together_vs_generate_batch"] = mine["together"]["tokens_per_s"] / peer
        pairs = [(a, b) for x, y in zip(sorted(mine["tokens"]), sorted(theirs["tokens"]), strict=True)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        result["same_tokens_in_bfloat16"] = sum(a == b for a, b in pairs) / len(pairs)
    return result


def table(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"# {m.get('name', 'CPU')}, {result['date']}",
        "",
        f"torch {m['torch']}, transformers {m['transformers']}, triton {m['triton']}. Measured rooflines: "
        f"{m['read_gb_s']:.0f} GB/s read, {m['matrix_tflops']:.1f} TFLOP/s bfloat16. `{result['command']}`",
        "",
        f"Kernels: {m['kernels']}",
        "",
        f"Parity of pico-instruct in float32 ({result['parity'].get('prompts', 0)} prompts): "
        f"equal to the CPU {result['parity'].get('equal_to_cpu')}, equal to `generate` "
        f"{result['parity'].get('equal_to_generate')} {result['parity'].get('error', '')}",
    ]
    for name, found in result["shapes"].items():
        mine, theirs, judged = found["ours"], found["transformers"], found["judged"]
        lines += ["", f"## {name}", ""]
        if "error" in mine:
            lines.append(f"failed: {mine['error']}")
            continue
        single, peer = mine["single"], theirs.get("single", {})
        batch = theirs.get("generate_batch", {})
        stages = mine["stages"]
        rows = [
            ("one stream, tokens/s", f"{single['tokens_per_s']:.1f} ({judged['single_share_of_bandwidth']:.0%} of the "
             "bandwidth)", f"{peer.get('tokens_per_s', 0):.1f} (`generate`)"),
            (f"{mine['together']['requests']} together, tokens/s", f"{mine['together']['tokens_per_s']:.0f}",
             f"{theirs.get('generate', {}).get('tokens_per_s', 0):.0f} (`generate`), "
             f"{batch.get('tokens_per_s', 0):.0f} (`generate_batch`) {batch.get('error', '')}"),
            (f"saturated mix of {mine['saturated']['requests']}, tokens/s",
             f"{mine['saturated']['tokens_per_s']:.0f}", ""),
            ("prefill, tokens/s", f"{mine['prefill']['tokens_per_s']:.0f} "
             f"({judged['prefill_share_of_matrix_rate']:.0%} of the matrix rate)", ""),
            ("first token of 32 prompts of 128, p50 / last, ms",
             f"{mine['ttft_32']['p50_ms']:.0f} / {mine['ttft_32']['max_ms']:.0f}", ""),
            ("weights read, s", f"{stages.get('weights_s', stages['load_s'])}", f"{theirs.get('load_s', 0):.1f}"),
            ("start to first token, s", f"{mine['first_token_s']:.1f}", f"{theirs.get('first_token_s', 0):.1f}"),
            (f"{len(mine['graphs'])} graphs captured, s / MB", f"{mine['graphs_s']:.1f} / {mine['graphs_mb']}", ""),
            ("activations at most, MB", f"{stages.get('activations_mb', '-')}", ""),
            ("cache, tokens", f"{stages['kv_cache_tokens']}", ""),
        ]  # fmt: skip
        lines += ["| | ours | transformers |", "| --- | --- | --- |"]
        lines += [f"| {a} | {b} | {c} |" for a, b, c in rows]
        forward = stages.get("fused_decoder", stages.get("transformers_forward"))
        lines += ["", f"Forward pass: {forward}", "", f"Stages: {stages}", "",
                  f"Compared: { {k: round(v, 3) for k, v in judged.items()} }"]  # fmt: skip
        if name == "llama-8b":
            lines += ["", f"Targets for one H200 in bfloat16: {TARGETS}"]
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], load: dict[str, str], folder: Path) -> None:
    """The table and the figures; ``load`` is what differs from the usual weights and cache."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [result["machine"].get("name", "cpu"), *(f"{key} {value}" for key, value in sorted(load.items()))]
    label = re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
    base = folder / f"gpu-{label}-{result['date']}"
    base.with_suffix(".md").write_text(table(result))
    base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", default="llama-8b,qwen3-0.6b")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serve-app-gpu", help="checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--quantization", default="none", help="of our side: none or fp8")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of our side: auto or fp8")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    from benchmarks.gpu import shapes

    device, amount = options.device, plan(options.device, options.quick)
    if options.quantization != "none":
        amount["load"] = {"quantization": options.quantization}
    if options.kv_cache_dtype != "auto":
        amount.setdefault("load", {})["kv_cache_dtype"] = options.kv_cache_dtype
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "date": str(datetime.date.today()),
        "command": " ".join(["python -m benchmarks gpu", *(a for a in given if not a.startswith("/"))]),
        "machine": side("machine", device, options.work, {}),
        "parity": side("parity", device, options.work, {}),
        "shapes": {},
    }
    if "error" in result["machine"]:
        raise SystemExit(f"no figures: {result['machine']['error']}")
    checks = Checks()
    for side_of in ("equal_to_cpu", "equal_to_generate"):
        checks.equal(f"greedy tokens of pico-instruct, {side_of}", result["parity"].get(side_of), True)
    checks.require()
    for name in options.shapes.split(","):
        print(f"  {name}: writing the checkpoint ...", file=sys.stderr, flush=True)
        path = shapes.write(name, options.work, device)
        found = {"ours": side("ours", device, path, amount)}
        found["transformers"] = (
            {"error": "left out"} if options.no_transformers else side("transformers", device, path, amount)
        )
        found["judged"] = judge(found, path, result["machine"])
        result["shapes"][name] = found
        write(result, amount.get("load", {}), options.out)  # what is there stays, whatever becomes of the next one
    print(table(result))
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
