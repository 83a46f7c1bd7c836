"""Bytes of weights in fewer bits, where only a configuration describes them: ``quantization_config``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# Always as they are: what is no product of rows with a matrix.
_PLAIN = ("norms", "embedding", "routers")


@dataclass(slots=True, frozen=True)
class Format:
    """``bits`` per weight, of which those of scales are a part; ``skipped`` are patterns of names that stay as they
    are.
    """

    name: str
    bits: float
    skipped: tuple[re.Pattern[str], ...] = ()
    only_experts: bool = False
    plain: tuple[str, ...] = field(default=_PLAIN)
    # Columns of an expert's weights that share a scale, where a worker with a GPU keeps experts' codes if ranks have
    # whole groups, and unpacks all else (serve_app/models/loading/packed.py). 0: it unpacks all. None: transformers
    # sees to them.
    group: int | None = None
    # Whether transformers sees to models without experts on one GPU.
    dense: bool = False
    # Of an expert's weight, where that differs.
    expert_bits: float = 0.0

    def bits_of(self, role: str) -> float:
        """Per weight of a role that is in fewer bits."""
        return self.expert_bits if role == "experts" and self.expert_bits else self.bits

    def holds(self, name: str, role: str) -> bool:
        """Whether the tensor of this name is in fewer bits."""
        if role in self.plain or name.endswith("bias") or (self.only_experts and role != "experts"):
            return False
        # Expressions may end where the name of the module does.
        named = (name, name.removesuffix(".weight"))
        return not any(pattern.search(each) for pattern in self.skipped for each in named)


def read_format(described: dict[str, Any] | None, experts: str | None = None) -> Format | None:
    """The format that a ``quantization_config`` names; None for none. ``experts``: ``expert_dtype`` of the
    configuration. Raises ValueError for one that is not known."""
    if not described:
        return None
    method = str(described.get("quant_method", ""))
    if method == "mxfp4":
        # Open Compute Project's MX: 4 bits a value and 8 for each 32.
        skipped = tuple(_pattern(name) for name in described.get("modules_to_not_convert") or ())
        return Format("mxfp4", 4 + 8 / 32, skipped, only_experts=True, group=32)
    if method in ("fp8", "fbgemm_fp8"):
        rows, columns = described.get("weight_block_size") or (1, 4096)
        skipped = tuple(_pattern(name) for name in described.get("modules_to_not_convert") or ("lm_head",))
        group = {"fp8": 128 if (rows, columns) == (128, 128) else 0}.get(method)
        if "fp4" in (experts, described.get("expert_dtype")):
            # DeepSeek V4's: MX's 4 bits, and scales that are a byte each.
            bits, four = 8 + 8 / (rows * columns), 4 + 8 / 32
            return Format("fp8, experts in fp4", bits, skipped, group=32, dense=True, expert_bits=four)
        return Format("fp8", 8 + 32 / (rows * columns), skipped, group=group, dense=True)
    if method in ("gptq", "awq"):
        group = described.get("group_size") or 128
        bits = described.get("bits") or described.get("w_bit") or 4
        return Format(method, bits + (16 + bits) / group, (_pattern("lm_head"),))
    if method == "compressed-tensors":
        groups = list((described.get("config_groups") or {}).values())
        weights = (groups[0] if groups else {}).get("weights") or {}
        bits = weights.get("num_bits") or 8
        group = weights.get("group_size")
        skipped = tuple(_pattern(name) for name in described.get("ignore") or ())
        name, each = f"{weights.get('type', 'int')}{bits}", bits + (16 / group if group else 16 / 4096)
        ours = name == "int4" and group and weights.get("symmetric")
        return Format(name, each, skipped, group=(32 if group == 32 else 0) if ours else None)
    raise ValueError(
        f"quantization_config names {method or 'no method'}; known are mxfp4, fp8, gptq, awq and compressed-tensors. "
        "Give a folder with the weights: their headers say what they take"
    )


def _pattern(name: str) -> re.Pattern[str]:
    """``re:...`` is an expression, anything else a module or the start of its name."""
    if name.startswith("re:"):
        return re.compile(name[3:])
    return re.compile(r"(^|\.)" + re.escape(name) + r"(\.|$)")
