"""``python -m benchmarks planned``: what a plan for a CPU says of weights, cache and activations, beside what a worker
then holds, over 72 small models and settings. Bytes are counted where they lie, however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.planning.devices import cpu
from serve_app.planning.held import Held, panels_here
from serve_app.planning.plan import Plan, ServingTarget, make_plan
from serve_app.planning.ranks import Split
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers

COMMON: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None}
EXPERTS = {"head_dim": 64, "num_experts_per_tok": 2}
# By name, the prefix of transformers' classes and what is special.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "gemma3": ("Gemma3", {"head_dim": 64, "sliding_window": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 128, **EXPERTS}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, **EXPERTS}),
    "deepseek": ("DeepseekV3", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
        "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48, "v_head_dim": 64, "num_key_value_heads": 4}),
    "qwen3-next": ("Qwen3Next", {
        "num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "granite hybrid": ("GraniteMoeHybrid", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 256, "mamba_n_heads": 32,
        "mamba_d_head": 16, "mamba_d_state": 48, "layer_types": ["mamba", "attention"]}),
}  # fmt: skip
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "global_head_dim": 128}
_LAYERS |= {"head_dim": 64, "vocab_size_per_layer_input": 1024}
FAMILIES |= {
    "gemma4": ("Gemma4", {
        **_LAYERS, "hidden_size_per_layer_input": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": 2 * ["sliding_attention", "full_attention"]}),
    "gemma4 moe": ("Gemma4", {
        **_LAYERS, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 128,
        "top_k_experts": 2}),
}  # fmt: skip
# Contexts are eight times as long as what is chosen.
_CHOOSES = {**FAMILIES["deepseek"][1], "index_n_heads": 16, "index_head_dim": 32, "index_topk": 64}
_CHOOSES |= {"num_hidden_layers": 3, "pad_token_id": None}
FAMILIES |= {
    "deepseek v3.2": ("DeepseekV32", _CHOOSES),
    "glm 5": ("GlmMoeDsa", {**_CHOOSES, "indexer_types": ["full", "shared", "full"]}),
}  # fmt: skip
_SEES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
# Those that see as well: the prefix of transformers' classes, the decoder's and the encoder's, what is special of each.
SEEING: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", "Llama", "CLIPVision", {}, {"image_size": 32, "patch_size": 8, "projection_dim": 128}),
    "gemma3, sees": (
        "Gemma3", "Gemma3Text", "SiglipVision", {"head_dim": 64, "sliding_window": 64},
        {"image_size": 256, "patch_size": 8}),
    "kimi": (
        "Kimi_K25", "DeepseekV3", "Kimi_K25Vision", FAMILIES["deepseek"][1],
        {"patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8}),
    "glm 5.3 flash": (
        "Glm5Next", "Glm5NextText", "Glm5NextVision", {
            **_CHOOSES, "qk_rope_head_dim": 0, "qk_nope_head_dim": 64, "index_kpool": 4, "linear_num_heads": 4,
            "linear_head_dim": 32, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"patch_size": 8, "depth": 2, "num_heads": 2, "out_hidden_size": 256, "projection_intermediate_size": 256}),
}  # fmt: skip
SETTINGS = [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
CACHE_BYTES = 4 << 20
ROWS, SEQUENCES = 448, 2


@dataclass(slots=True)
class Compared:
    """What is planned as a share of what is there. ``activations``: None where one C++ call has buffers of its own,
    which are not seen.
    """

    family: str
    dtype: str
    quantization: str
    weights: float
    tokens: float
    cache: float
    activations: float | None


def write(folder: Path, family: str) -> Path:
    """A random checkpoint in bfloat16."""
    import torch
    import transformers

    def config_of(name: str, sizes: dict[str, Any]) -> Any:
        return getattr(transformers, f"{name}Config")(**sizes)

    torch.manual_seed(0)
    if family in SEEING:
        prefix, text, sees, more, seen = SEEING[family]
        parts = {"text_config": config_of(text, COMMON | more), "vision_config": config_of(sees, _SEES | seen)}
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config_of(prefix, parts))
    else:
        prefix, more = FAMILIES[family]
        text = f"{prefix}Text" if prefix.startswith("Gemma") else prefix
        model = getattr(transformers, f"{prefix}ForCausalLM")(config_of(text, COMMON | more))
    model.bfloat16().save_pretrained(folder)
    return folder


def compare(folder: Path, family: str, dtype: str, quantization: str) -> Compared:
    """Loads the model in ``folder`` as a worker does, and plans it by its configuration and the file's header."""
    from serve_app.engine.build import EngineLimits, build_engine
    from serve_app.kernels.decoder import Decoder
    from serve_app.models.load import load_causal_lm

    model = load_causal_lm(folder, dtype=dtype, quantization=quantization)
    engine = build_engine(model, EngineLimits(kv_cache_bytes=CACHE_BYTES, max_num_seqs=SEQUENCES))
    plan = planned(folder, dtype, quantization)
    cache = engine.runner.kv
    kept = sum(plane.nbytes for plane in (*cache.planes, *cache.states))
    blocks = plan.tokens // 32 + 1
    states = (plan.slots.count + bool(plan.slots.count)) * plan.model.state_bytes  # the first is nobody's
    taken = None if isinstance(model.forward, Decoder) else step_bytes(model)
    return Compared(
        family, dtype, quantization,
        weights=plan.model.weight_bytes / model.report["weight_bytes"],
        tokens=plan.tokens / model.report["kv_cache_tokens"],
        cache=(blocks * 32 * plan.token_bytes + states) / kept,
        activations=None if taken is None else plan.ranks[0].activations / taken,
    )  # fmt: skip


def planned(folder: Path, dtype: str, quantization: str) -> Plan:
    config = json.loads((folder / "config.json").read_text())
    held = Held(dtype, quantization, panels_here())
    model = plan_model("x", config, read_headers(folder), item=4 if dtype == "float32" else 2, held=held)
    asked = ServingTarget(cpu(1 << 33), batch_tokens=ROWS, sequences=SEQUENCES, kv_cache_bytes=CACHE_BYTES)
    return make_plan(model, asked, Split())


def step_bytes(model: Any) -> int:
    """At the peak of a step of two prompts; where keys are chosen, of a step of one text at the end of its context."""
    context = COMMON["max_position_embeddings"]
    return peak_bytes(model, [(0, ROWS // 2)] * 2 if not model.chooses else [(context - ROWS, ROWS)])


def peak_bytes(model: Any, texts: list[tuple[int, int]]) -> int:
    """At the peak of a step of ``texts``: of each how many tokens are computed, and how many follow."""
    import torch

    from serve_app.engine.blocks import BLOCK_TOKENS
    from serve_app.engine.request import Request
    from serve_app.engine.step import Scheduled, build_batch
    from serve_app.models.latent import latent_of
    from serve_app.models.peak import Living
    from serve_app.sampling_params import SamplingParams

    expanded = [each for child in model.module.modules() if (each := latent_of(child)) is not None]
    weights = [*model.module.parameters(), *(part for each in expanded for part in (each.keys, each.values))]
    blocks, first, then = 1, [], []
    for index, (before, count) in enumerate(texts):
        total = before + count
        ids = [(7 * i + index) % COMMON["vocab_size"] for i in range(total)]
        request = Request(str(index), ids, total, SamplingParams(), b"")
        request.blocks = list(range(blocks, blocks + -(-total // BLOCK_TOKENS)))
        blocks += len(request.blocks)
        request.state = 1 + index
        first += [Scheduled(request, 0, before, 1)] if before else []
        then.append(Scheduled(request, before, count, 1))
    kv = model.kv_shape.allocate(blocks, "cpu", len(texts))
    # Outside of inference mode, in which operators are not seen one by one.
    with torch.no_grad():
        if first:
            model.forward(build_batch(first, kv))
        batch = build_batch(then, kv)
        model.forward(batch)  # tables of positions are made once
        with Living([*weights, *model.module.buffers(), *kv.planes, *kv.states]) as living:
            model.forward(batch)
    return living.peak


def every() -> Iterator[Compared]:
    """One family and setting after the other."""
    with tempfile.TemporaryDirectory(prefix="planned-") as scratch:
        for family in (*FAMILIES, *SEEING):
            folder = write(Path(scratch) / family, family)
            for dtype, quantization in SETTINGS:
                yield compare(folder, family, dtype, quantization)


def worst(found: list[Compared]) -> float:
    """The difference in weights that 95 of a hundred models and settings stay below."""
    return statistics.quantiles([abs(each.weights - 1) for each in found], n=20)[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks planned", description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found = []
    for each in every():
        found.append(each)
        if not arguments.json:
            steps = "not seen" if each.activations is None else f"{each.activations:.2f}"
            print(
                f"{each.family:12} {each.dtype:9} {each.quantization:5} weights {each.weights:.4f}  cache "
                f"{each.cache:.4f}  tokens {each.tokens:.4f}  activations {steps}",
                flush=True,
            )
    if arguments.json:
        rows = [{name: getattr(each, name) for name in Compared.__slots__} for each in found]
        print(json.dumps({"p95": worst(found), "models": rows}))
    else:
        least = min(each.activations for each in found if each.activations is not None)
        print(f"{len(found)} models and settings: weights differ by {worst(found):.2%} (p95), and the least that is")
        print(f"planned for activations is {least:.2f} of what a step takes")
    return 0
