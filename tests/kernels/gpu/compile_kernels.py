"""Compiles the kernels without a GPU for a compute capability (90: H100 and H200; 80: A100, and by its instructions 8.6
and 8.9) and prints what came out, one JSON line each. Run as a script: in the tests' process kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve_app.kernels.gpu import adapters, attention, experts, few_rows, flash, fused, plan, sampling

CAPABILITY = int(sys.argv[1])
# Of attention two sizes only, and nothing in 8 bits.
FEW = "few" in sys.argv
TARGET = GPUTarget("cuda", CAPABILITY, 32)
FLOATS = {"scale", "softcap", "eps", "alpha", "limit"}
# Strides that a cache of more than 2**31 elements a layer has.
FAR = {"kv_plane": "i64", "copy_plane": "i64"}


def build(name: str, kernel, pointers: dict[str, str], constants: dict[str, object], **options: int) -> None:
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        known = "constexpr" if parameter.name in constants else pointers.get(parameter.name)
        signature[parameter.name] = known or ("fp32" if parameter.name in FLOATS else FAR.get(parameter.name, "i32"))
        if known is None or known.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    print(json.dumps({"name": name, "shared": compiled.metadata.shared, "tensor_cores": "mma" in ptx,
                      "spills": ".local" in ptx}))  # fmt: skip


def attend(dtype: str, cache: str, longest: int, group: int, dim: int, *, latent: bool = False) -> None:
    kinds = dict(q=f"*{dtype}", kv=f"*{cache}", query_start="*i32", seq_lens="*i32", tables="*i32", out=f"*{dtype}",
                 partial="*fp32", stats="*fp32", sinks="*fp32")  # fmt: skip
    launch = plan.plan_launch(
        requests=4, tokens=4 * longest, max_query_len=longest, max_seq_len=4096, group=group, kv_heads=8, dim=dim,
        item_bytes=4 if dtype == "fp32" else 2, units=132, shared=(227 if CAPABILITY >= 90 else 99) << 10,
    )  # fmt: skip
    constants = dict(attention._head_constants(8 * group, 8, dim, latent=latent), BLOCK_M=launch.block_m,
                     BLOCK_N=launch.block_n, WINDOW=0, CAPPED=False, SINKS=False, DECODE=longest == 1,
                     SPLITS=launch.splits, WIDE=False)  # fmt: skip
    if latent:  # keys and values of all heads in one place
        constants |= dict(kv_plane=0, kv_head_stride=0)
    name = f"attend {dtype} {cache} {longest} {dim}"
    build(name, attention._attend, kinds, constants, num_warps=launch.warps, num_stages=launch.stages)


def beside_attention(cache: str) -> None:
    kinds = dict(qkv="*bf16", q="*bf16", kv=f"*{cache}", cos="*fp32", sin="*fp32", positions="*i64", slots="*i64",
                 q_gain="*bf16", k_gain="*bf16", k="*bf16", v="*bf16")  # fmt: skip
    shape = dict(Q_HEADS=32, KV_HEADS=8, DIM=128, HALF=64, HALF_PADDED=64, REST=0, REST_PADDED=1, DIM_PADDED=128)
    build(f"rotate {cache}", fused._rotate_and_write, kinds, {**shape, "NORMED": True, "BLOCK": 4}, num_warps=1)
    build(f"write {cache}", fused._write_kv, kinds, dict(HEADS=8, HEADS_PADDED=8, DIM=128, DIM_PADDED=128))


def few(most: int, tile: few_rows.Tile) -> None:
    kinds = dict(x="*bf16", weight="*bf16", bias="*bf16", out="*bf16")
    constants = dict(BLOCK_N=tile.n, BLOCK_K=tile.k, BIASED=False)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    name = f"few {most} rows {tile.n} {tile.k}"
    if most == 1:
        return build(name, few_rows._one_row, kinds, constants, **options)
    build(name, few_rows._few_rows, kinds, {**constants, "BLOCK_M": tile.rows, "WIDE": False}, **options)


def mixture(rows: int, dtype: str = "bf16", turned: bool = False, kind: int = experts.PLAIN) -> None:
    """Both products of Qwen3-30B-A3B's experts; ``turned``: as gpt-oss's weights lie, with biases and limits; ``kind``:
    in fewer bits."""
    tile, direct = experts.choose_tile(rows, 8, 128, 4 if dtype == "fp32" else 2)
    kinds = dict.fromkeys(("x", "gate", "up", "gate_bias", "up_bias", "inner", "down", "bias", "each"), f"*{dtype}")
    kinds |= dict.fromkeys(("index", "order", "starts", "firsts"), "*i64")
    if kind:
        kinds |= dict.fromkeys(("gate", "up", "down"), "*u8")
    scale = {experts.FLOAT4: "*u8", experts.FLOAT8: "*fp32"}.get(kind, "*bf16")
    kinds |= dict.fromkeys(("gate_scales", "up_scales", "scales"), scale)
    constants = dict(BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, CHOICES=8, CHOICES_PADDED=8, EXPERTS=128,
                     EXPERTS_PADDED=128, DIRECT=direct, WIDE=False, BIASED=turned, KIND=kind,
                     GROUP=128 if kind == experts.FLOAT8 else 32)  # fmt: skip
    constants["of_output" if turned and not kind else "of_input"] = 1
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    name = f"experts {dtype} {rows}{' turned' if turned else ''}{f' in codes {kind}' if kind else ''}"
    build(f"down {name}", experts._down, kinds, constants, **options)
    if turned and not kind:
        del constants["of_output"]  # gates and ups in turn
    build(f"gate up {name}", experts._gate_up, kinds, {**constants, "LIMITED": turned}, **options)


def main() -> None:
    mixture(1)
    mixture(1, kind=experts.FLOAT4)
    if not FEW:
        for rows in (64, 200, 512, 8192):
            mixture(rows)
        for kind in (experts.FLOAT4, experts.WHOLE4, experts.FLOAT8):
            for rows in (1, 64, 200, 8192):
                mixture(rows, turned=kind == experts.FLOAT4, kind=kind)
        mixture(4, turned=True)
        mixture(8192, turned=True)
        mixture(4, "fp32")
        mixture(100, "fp32")
    sums = dict(each="*bf16", weights="*fp32", out="*bf16")
    build("sum of choices", experts._sum_choices, sums, dict(CHOICES=8, BLOCK=1024))
    for shape in ((1, 4, 128), (512, 4, 128)):
        attend("bf16", "bf16", *shape)
    if not FEW:
        for shape in ((512, 2, 256), (512, 1, 64), (3, 7, 80), (512, 2, 512)):
            attend("bf16", "bf16", *shape)
        attend("fp32", "fp32", 512, 2, 256)
        for longest, group in ((1, 8), (1, 16), (512, 10), (512, 16)):
            attend("bf16", "bf16", longest, group, 576, latent=True)
        attend("bf16", "fp8e4nv", 1, 16, 576, latent=True) if CAPABILITY >= 89 else None
    beside_attention("bf16")
    constants = dict(HEADS=32, DIM=128, DIM_PADDED=128, SPLITS=8, SINKS=True)
    build("join", attention._join, dict(partial="*fp32", stats="*fp32", out="*bf16", sinks="*fp32"), constants)
    kinds = dict(kv="*bf16", copies="*bf16", seq_lens="*i32", start="*i32", tables="*i32")
    build("copy", flash._copy_keys, kinds, dict(HEADS=8, DIM=128, DIM_PADDED=128))
    kinds = dict(x="*bf16", delta="*bf16", weight="*bf16", normed="*bf16", total="*bf16", gate_up="*bf16", out="*bf16")
    build("norm", fused._add_rms_norm, kinds, dict(WIDTH=4096, BLOCK=4096, ADDS=True), num_warps=8)
    build("swiglu", fused._swiglu, kinds, dict(WIDTH=14336, BLOCK=1024))
    places = dict(probs="*fp32", done="*i1", chosen="*i64", top_k="*i64", top_p="*fp32", min_p="*fp32", points="*fp64")
    build("draw", sampling._draw_truncated, places, dict(BLOCK=4096), num_warps=8)
    tiles = dict(order="*i64", place="*i64", first="*i64", count="*i64", table="*i64", sums="*fp32")
    sizes = dict(TABLE=9, ROWS=16, LANES=16, WIDTH=1024)
    build("shrink", adapters._shrink, {**tiles, "x": "*bf16"}, {**sizes, "COLUMNS": 64}, num_warps=4)
    kinds_of = {**tiles, "out": "*bf16", "scales": "*fp32", "blocks": "*i32"}
    shape = dict(FIRST=5, PARTS=4, SPLITS=8, OUTPUTS=64)
    build("expand", adapters._expand, kinds_of, {**sizes, **shape}, num_warps=4)
    if CAPABILITY >= 90:  # tiles that do not fit a smaller GPU's shared memory are left out there
        for most, tiles in few_rows.TILES.items():
            for tile in tiles[: 1 if FEW else None]:
                few(most, tile)
    if CAPABILITY >= 89 and not FEW:
        attend("bf16", "fp8e4nv", 1, 4, 128)
        attend("bf16", "fp8e4nv", 512, 4, 128)
        beside_attention("fp8e4nv")
        kinds |= dict(codes="*fp8e4nv", scale="*fp32")
        build("quantize", fused._quantize_rows, kinds, dict(WIDTH=14336, BLOCK=16384), num_warps=16)


if __name__ == "__main__":
    main()
