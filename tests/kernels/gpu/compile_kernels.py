"""Compiles every kernel for compute capability 9.0 (H100, H200) without a GPU and prints what came out, one JSON line
each. Run as a script: in the tests' own process the kernels are interpreted.
"""

from __future__ import annotations

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve_app.kernels.gpu import attention, fused, sampling

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = {"scale", "softcap", "eps"}


def build(name: str, kernel, pointers: dict[str, str], constants: dict[str, object], **options: int) -> None:
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        known = "constexpr" if parameter.name in constants else pointers.get(parameter.name)
        signature[parameter.name] = known or ("fp32" if parameter.name in FLOATS else "i32")
        if known is None or known.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    print(json.dumps({"name": name, "shared": compiled.metadata.shared, "tensor_cores": "mma" in ptx,
                      "spills": ".local" in ptx}))  # fmt: skip


def main() -> None:
    for cache in ("bf16", "fp8e4nv"):
        kinds = dict(q="*bf16", kv=f"*{cache}", query_start="*i32", seq_lens="*i32", tables="*i32", out="*bf16",
                     partial="*fp32", stats="*fp32", sinks="*fp32")  # fmt: skip
        for longest, group, dim in ((1, 4, 128), (512, 4, 128), (512, 2, 256), (512, 1, 64))[
            : 4 if cache == "bf16" else 2
        ]:
            launch = attention.plan_launch(
                requests=4, tokens=4 * longest, max_query_len=longest, max_seq_len=4096, group=group, kv_heads=8,
                dim=dim, item_bytes=2, units=132,
            )  # fmt: skip
            constants = dict(HEADS=8 * group, GROUP=group, DIM=dim, DIM_PADDED=dim, BLOCK_M=launch.block_m,
                             BLOCK_N=launch.block_n, WINDOW=0, CAPPED=False, SINKS=False, DECODE=longest == 1,
                             SPLITS=launch.splits, WIDE=False)  # fmt: skip
            build(f"attend {cache} {longest} {dim}", attention._attend, kinds, constants,
                  num_warps=launch.warps, num_stages=launch.stages)  # fmt: skip
        kinds = dict(qkv="*bf16", q="*bf16", kv=f"*{cache}", cos="*fp32", sin="*fp32", positions="*i64", slots="*i64",
                     q_gain="*bf16", k_gain="*bf16", k="*bf16", v="*bf16")  # fmt: skip
        shape = dict(Q_HEADS=32, KV_HEADS=8, DIM=128, HALF=64, HALF_PADDED=64, REST=0, REST_PADDED=1, DIM_PADDED=128)
        build(f"rotate {cache}", fused._rotate_and_write, kinds, {**shape, "NORMED": True, "BLOCK": 4}, num_warps=1)
        build(f"write {cache}", fused._write_kv, kinds, dict(HEADS=8, HEADS_PADDED=8, DIM=128, DIM_PADDED=128))
    constants = dict(HEADS=32, DIM=128, DIM_PADDED=128, SPLITS=8, SINKS=True)
    build("join", attention._join, dict(partial="*fp32", stats="*fp32", out="*bf16", sinks="*fp32"), constants)
    kinds = dict(x="*bf16", delta="*bf16", weight="*bf16", normed="*bf16", total="*bf16", gate_up="*bf16", out="*bf16")
    build("norm", fused._add_rms_norm, kinds, dict(WIDTH=4096, BLOCK=4096, ADDS=True), num_warps=8)
    kinds |= dict(codes="*fp8e4nv", scale="*fp32")
    build("quantize", fused._quantize_rows, kinds, dict(WIDTH=14336, BLOCK=16384), num_warps=16)
    places = dict(probs="*fp32", done="*i1", chosen="*i64", top_k="*i64", top_p="*fp32", min_p="*fp32", points="*fp64")
    build("draw", sampling._draw_truncated, places, dict(BLOCK=4096), num_warps=8)
    build("swiglu", fused._swiglu, kinds, dict(WIDTH=14336, BLOCK=1024))


if __name__ == "__main__":
    main()
