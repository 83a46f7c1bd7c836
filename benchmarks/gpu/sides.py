"""What ``benchmarks/gpu/gpu.py`` measures, each side in a process of its own: prints one JSON object as its last line.

python -m benchmarks.gpu.sides {machine,ours,transformers,parity} DEVICE MODEL_DIR OPTIONS_JSON
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BORN = time.perf_counter()

import torch  # noqa: E402

from benchmarks import ROOT  # noqa: E402


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def seconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Median of single runs after two that warm up."""
    taken = []
    for _ in range(rounds + 2):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def machine(device: str, _: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What the device can do at most, as torch measures it: bytes read per second, bfloat16 products per second."""
    small = device == "cpu"
    numbers = (1 << 24) if small else (1 << 31)
    while not small and 4 * numbers > 0.6 * free_bytes(device):  # two arrays of them
        numbers //= 2
    data = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(data)
    copy = 2 * data.nbytes / seconds(lambda: target.copy_(data), device, 10)
    size = 512 if small else 8192
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds(lambda: a @ b, device, 10)
    found: dict[str, Any] = {"copy_gb_s": copy / 1e9, "matrix_tflops": rate / 1e12, "torch": torch.__version__}
    if device == "cuda":
        # A matrix times one vector reads as a decode step does.
        matrix = data.view(1 << 16, -1)
        vector = torch.randn(matrix.shape[1], device=device).to(torch.bfloat16)
        read = data.nbytes / seconds(lambda: torch.mv(matrix, vector), device, 10)
        properties = torch.cuda.get_device_properties(0)
        found |= {"mv_gb_s": read / 1e9, "name": properties.name, "memory_gb": properties.total_memory / 1e9,
                  "cuda": torch.version.cuda}  # fmt: skip
    import transformers

    from serve_app.kernels.gpu.backend import describe

    found["kernels"] = " ".join(describe(torch.device(device)))
    found |= {"transformers": transformers.__version__, "read_gb_s": max(found["copy_gb_s"], found.get("mv_gb_s", 0))}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    return found


def prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids; different seeds share no prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab) for _ in range(length)] for length in lengths]


def mixed_lengths(count: int, scale: float) -> list[tuple[int, int]]:
    """Prompt and answer lengths like ShareGPT's: log-normal with medians of about 110 and 150 tokens, long tails."""
    rng = random.Random(5)

    def draw(median: float, sigma: float, most: int) -> int:
        return max(4, min(int(most * scale), int(scale * rng.lognormvariate(median, sigma))))

    return [(draw(4.7, 1.1, 1024), draw(5.0, 0.8, 1024)) for _ in range(count)]


class Ours:
    """The engine as a worker builds it: graphs, overlap and cache size included."""

    def __init__(self, device: str, path: Path, options: dict[str, Any]) -> None:
        from serve_app.engine.build import EngineLimits, build_engine, gpu_cache_bytes
        from serve_app.models.load import load_causal_lm

        self.device, self.count = device, 0
        self.model = load_causal_lm(
            path, device=device, max_model_len=options["context"], **options.get("load", {})
        )  # fmt: skip
        limits = EngineLimits(
            max_batch_tokens=options["batch_tokens"], max_num_seqs=options["seqs"], max_model_len=options["context"]
        )
        if device == "cuda":
            limits.kv_cache_bytes = gpu_cache_bytes(self.model, limits, 0.9)
        self.engine = build_engine(self.model, limits)
        self.vocab = min(self.model.vocab_size, 10000)

    def run(self, wanted: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Runs (prompt, new tokens) pairs to their end; when which token was there, in seconds from the start."""
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams

        self.engine.scheduler.forget_cache()
        for prompt, new in wanted:
            sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            self.engine.add(Request(str(self.count), list(prompt), len(prompt), sampling, root=b"bench"))
            self.count += 1
        first: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        started = time.perf_counter()
        while self.engine.has_work:
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                first.setdefault(output.request_id, time.perf_counter() - started)
        return {
            "seconds": time.perf_counter() - started,
            "first": list(first.values()),
            "tokens": list(tokens.values()),
        }

    def same(self, count: int, length: int, new: int, rounds: int) -> list[dict[str, Any]]:
        """``rounds`` runs after one that is left out: a kernel may be compiled when it is first of use."""
        return [
            self.run([(p, new) for p in prompts([length] * count, self.vocab, 100 + number)])
            for number in range(rounds + 1)
        ][1:]


def bytes_read(model: Any, path: Path) -> int:
    """Of weights in a decode step of one row: all but the embedding, of which only rows are read, and experts that are
    not chosen.
    """
    from serve_app.models.decoders.device import DeviceForward

    if isinstance(model.forward, DeviceForward):
        layers = model.forward.layers
        experts = sum(n.mixture.read_by_one_row for n in layers if n.mixture is not None)
        linears = [x for n in layers for x in (n.qkv, n.o, n.gate_up, n.down) if x is not None]
        weights = [x.codes if hasattr(x, "codes") else x.weight for x in linears]
        return experts + sum(w.nbytes for w in [*weights, model.forward.head.weight])
    config = json.loads((path / "config.json").read_text())
    stored = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    from benchmarks.gpu.shapes import experts_of

    experts, chosen = experts_of(config), config.get("num_experts_per_tok") or 0
    unread = 2 * 3 * config["hidden_size"] * config.get("moe_intermediate_size", 0) * max(0, experts - chosen)
    stored -= unread * config["num_hidden_layers"]
    return stored - (0 if config.get("tie_word_embeddings") else embedding)


def planned(side: Ours, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What a plan says from the configuration and the files' headers, as shares of what the worker holds: weights,
    activations of its largest step, and tokens that the cache takes.
    """
    from dataclasses import replace

    from serve_app.planning.devices import GPUS
    from serve_app.planning.plan import ServingTarget, make_plan
    from serve_app.planning.ranks import Split
    from serve_app.planning.source import plan_model
    from serve_app.planning.tensors import read_headers

    report, item = side.model.report, 1 if options.get("load", {}).get("kv_cache_dtype") == "fp8" else 2
    model = plan_model("x", json.loads((path / "config.json").read_text()), read_headers(path), item=item)
    device = replace(GPUS["h100"], memory=torch.cuda.get_device_properties(0).total_memory)
    asked = ServingTarget(device, 1, 0.9, options["batch_tokens"], options["seqs"], options["context"])
    plan = make_plan(model, asked, Split())
    return {
        "weights": plan.model.weight_bytes / report["weight_bytes"],
        "activations": plan.ranks[0].activations / (report["activations_mb"] << 20),
        "tokens": plan.tokens / report["kv_cache_tokens"],
    }


def ours(device: str, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    side = Ours(device, path, options)
    side.run([(prompts([8], side.vocab, 1)[0], 2)])
    report: dict[str, Any] = {"first_token_s": time.perf_counter() - BORN, "stages": side.model.report}
    started, free = time.perf_counter(), free_bytes(device)
    while side.engine.runner.prepare():
        pass
    report["graphs_s"] = time.perf_counter() - started
    report["graphs_mb"] = (free - free_bytes(device)) >> 20
    report["graphs"] = getattr(side.engine.runner.forward, "captured", [])
    rounds, kv = options["rounds"], side.model.kv_shape
    report |= {"weight_bytes": bytes_read(side.model, path), "kv_token_bytes": kv.block_bytes // 32}
    side.run([(p, 8) for p in prompts([64] * 8, side.vocab, 2)])  # warms up

    new = options["single_new"]
    runs = side.same(1, 128, new, rounds)
    step = statistics.median((r["seconds"] - r["first"][0]) / (new - 1) for r in runs)
    report["single"] = {"tokens_per_s": 1 / step, "step_ms": 1e3 * step}

    new = options["together_new"]
    runs = side.same(64 if device == "cuda" else 4, 128, new, rounds)
    report["together"] = {"requests": len(runs[0]["tokens"]), "tokens_per_s": statistics.median(
        sum(map(len, r["tokens"])) / r["seconds"] for r in runs)}  # fmt: skip

    lengths = mixed_lengths(options["mixed"], 1.0 if device == "cuda" else 0.2)
    inputs = prompts([n for n, _ in lengths], side.vocab, 3)
    run = side.run([(p, new) for p, (_, new) in zip(inputs, lengths, strict=True)])
    generated = sum(map(len, run["tokens"]))
    report["saturated"] = {"requests": len(lengths), "prompt_tokens": sum(n for n, _ in lengths),
                           "generated_tokens": generated, "tokens_per_s": generated / run["seconds"]}  # fmt: skip

    count, length = options["prefill"]
    runs = side.same(count, length, 1, rounds)
    report["prefill"] = {"requests": count, "length": length,
                         "tokens_per_s": statistics.median(count * length / r["seconds"] for r in runs)}  # fmt: skip
    runs = side.same(32, 128, 4, rounds)
    report["ttft_32"] = {
        "p50_ms": 1e3 * statistics.median(t for r in runs for t in r["first"]),
        "max_ms": 1e3 * statistics.median(max(r["first"]) for r in runs),
    }
    report["tokens"] = side.run([(p, 16) for p in prompts([40] * 4, side.vocab, 9)])["tokens"]
    if device == "cuda":
        report["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        try:
            report["planned"] = planned(side, path, options)
        except ImportError as missing:  # plans read records, which take pydantic
            report["planned"] = {"error": str(missing)}
    return report


def transformers_side(device: str, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    started = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
    report: dict[str, Any] = {"load_s": time.perf_counter() - started}
    vocab = min(model.config.vocab_size, 10000)

    def generate(inputs: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(inputs, device=device)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return out[:, ids.shape[1] :].tolist()

    generate(prompts([16], vocab, 1), 2)
    report["first_token_s"] = time.perf_counter() - BORN
    new = min(options["single_new"], 128)
    started = time.perf_counter()
    generate(prompts([128], vocab, 100), new)
    report["single"] = {"tokens_per_s": new / (time.perf_counter() - started)}
    report["tokens"] = [generate([p], 16)[0] for p in prompts([40] * 4, vocab, 9)]
    new, count = options["together_new"], 64 if device == "cuda" else 4
    inputs = prompts([128] * count, vocab, 100)
    started = time.perf_counter()
    generate(inputs, new)
    report["generate"] = {"requests": count, "tokens_per_s": count * new / (time.perf_counter() - started)}
    if device == "cpu":
        report["generate_batch"] = {"error": "left out on a CPU, where it takes most of the memory for its cache"}
        return report
    failed = ""
    for options in batching_options():
        try:
            rate = generate_batch(model, inputs, new, options)
            report["generate_batch"] = {"requests": count, "tokens_per_s": rate, "after": failed}
            break
        except Exception as error:  # its API is young: what it says is part of the result
            failed = f"{type(error).__name__}: {error}"[:300]
            report["generate_batch"] = {"error": failed}
    return report


def batching_options() -> list[dict[str, Any]]:
    """For ``generate_batch``: its defaults, then without kernels that it would fetch over the network."""
    tried: list[dict[str, Any]] = [{}]
    try:
        from transformers import ContinuousBatchingConfig

        tried.append({"continuous_batching_config": ContinuousBatchingConfig(auto_switch_to_flash=False)})
    except (ImportError, TypeError):  # other versions have neither
        pass
    return tried


def generate_batch(model: Any, inputs: list[list[int]], new: int, options: dict[str, Any]) -> float:
    """Tokens per second of transformers' continuous batching, the better of two runs: in the first it compiles."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        answers = model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False, **options)
        taken = time.perf_counter() - started
        made = sum(len(a.generated_tokens) for a in answers.values())
        if made < len(inputs) * new:
            raise RuntimeError(f"{made} of {len(inputs) * new} tokens were generated")
        best = max(best, made / taken)
    return best


def parity(device: str, _: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the pico model in float32: this device's engine, the CPU's, and transformers' ``generate``."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision("highest")
    path = ROOT / "checkpoints" / "pico-instruct"
    load = {"load": {"dtype": "float32"}, "context": 512, "batch_tokens": 64, "seqs": 8}
    inputs = prompts([5, 40, 100, 3, 33, 64, 17, 90], 4000, 7)
    sides = {}
    for place in dict.fromkeys(("cpu", device)):
        side = Ours(place, path, load)
        while side.engine.runner.prepare():
            pass
        sides[place] = side.run([(p, 24) for p in inputs])["tokens"]
        # In the order in which first tokens came; sorted, the same set either way.
        sides[place].sort()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None  # ours goes on behind it as well
    wanted = []
    for prompt in inputs:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
            )
        wanted.append(out[0, len(prompt) :].tolist())
    return {"equal_to_cpu": sides[device] == sides["cpu"], "equal_to_generate": sides[device] == sorted(wanted),
            "prompts": len(inputs)}  # fmt: skip


SIDES = {"machine": machine, "ours": ours, "transformers": transformers_side, "parity": parity}

if __name__ == "__main__":
    name, device, folder, raw = sys.argv[1:]
    print("\n" + json.dumps(SIDES[name](device, Path(folder), json.loads(raw))))
