"""``adapter_config.json`` as PEFT 0.19 and its neighbours write it, without torch: upload checks and workers read it
alike.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
MAX_BYTES = 1 << 20
LARGEST_RANK = 256
# Fields that change what an adapter computes, and what they may say. Their absence is what PEFT's defaults are.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
         "layer_replication", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
         "megatron_config", "target_parameters"),
        (None, False, [], {}),
    ),
}  # fmt: skip
# These initialisations change the base model's own weights, which others share.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "mica", "lora_ga")
# A pattern is a regular expression of somebody's: what takes long to match is refused.
_LONGEST_PATTERN, _MOST_PATTERNS, _MOST_REPEATS = 200, 2000, 3


class AdapterRefused(ValueError):
    """An adapter that can't be served; the text names what is wrong with it and what to do."""


@dataclass(slots=True, frozen=True)
class AdapterConfig:
    """What the configuration says of ranks and scales."""

    rank: int
    alpha: float
    rslora: bool
    targets: list[str] | str | None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) where the adapter is rank-stabilised (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def require_target(self, module: str) -> None:
        """Refuses weights of a module that the configuration does not name: PEFT would leave them out."""
        if isinstance(self.targets, list) and not any(
            module == target or module.endswith("." + target) for target in self.targets
        ):
            raise AdapterRefused(
                f"the adapter has weights for {module}, which target_modules in adapter_config.json does not name; "
                "add it there"
            )


def read_config(data: bytes) -> AdapterConfig:
    """Raises :class:`AdapterRefused`."""
    if len(data) > MAX_BYTES:
        raise AdapterRefused(f"adapter_config.json has {len(data)} bytes, and {MAX_BYTES} are read; shorten it")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"adapter_config.json is no JSON ({error}); upload it again") from error
    if not isinstance(found, dict):
        raise AdapterRefused("adapter_config.json is no JSON object; upload the one that save_pretrained wrote")
    for name, allowed in _ONLY.items():
        if name in found and found[name] not in allowed:
            raise AdapterRefused(f"adapter_config.json has {name}: {_short(found[name])}, which is not served here")
    if "peft_type" not in found:
        raise AdapterRefused('adapter_config.json has no peft_type; it must be "LORA"')
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterRefused(
            f"adapter_config.json has init_lora_weights: {_short(start)}, which changes the base model's weights; save "
            "the adapter with path_initial_model_for_weight_conversion"
        )
    targets = found.get("target_modules")
    if not (targets is None or isinstance(targets, str) or _strings(targets)):
        raise AdapterRefused("adapter_config.json: target_modules must be a list of names or an expression")
    return AdapterConfig(
        rank=_rank("r", found.get("r", 8)),
        alpha=_alpha("lora_alpha", found.get("lora_alpha", 8)),
        rslora=found.get("use_rslora") is True,
        targets=targets,
        rank_pattern={k: _rank(f"rank_pattern.{k}", v) for k, v in _pattern(found, "rank_pattern").items()},
        alpha_pattern={k: _alpha(f"alpha_pattern.{k}", v) for k, v in _pattern(found, "alpha_pattern").items()},
    )


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST_RANK:
        raise AdapterRefused(f"adapter_config.json: {name} is {_short(value)}; a rank is from 1 to {LARGEST_RANK}")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterRefused(f"adapter_config.json: {name} is {_short(value)}; it must be a number")
    return float(value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _pattern(found: dict[str, Any], name: str) -> dict[str, Any]:
    patterns = found.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise AdapterRefused(f"adapter_config.json: {name} must be an object of at most {_MOST_PATTERNS} patterns")
    for pattern in patterns:
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{?]", pattern):
            raise AdapterRefused(
                f"adapter_config.json: {name} has the pattern {_short(pattern)}, which may take long to match; write "
                "names of modules"
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterRefused(f"adapter_config.json: {name} has {_short(pattern)}: {error}") from error
    return patterns


def _of_pattern(patterns: dict[str, T], module: str, otherwise: T) -> T:
    """As PEFT's ``get_pattern_key``: the first pattern that a name ends with."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
