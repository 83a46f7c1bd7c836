"""``adapter_config.json`` as PEFT 0.19 and its neighbours write it, without torch: upload checks and workers read it
alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
MAX_BYTES = 1 << 20
LARGEST_RANK = 256
_LARGEST_ALPHA = 1e30
# Fields that change what an adapter computes, and what they may say. Their absence is what PEFT's defaults are.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
         "layer_replication", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
         "megatron_config"),
        (None, False, [], {}),
    ),
}  # fmt: skip
# These initialisations change the base model's own weights, which others share.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# A pattern is a regular expression of somebody's: what takes long to match is refused.
_LONGEST_PATTERN, _MOST_PATTERNS, _MOST_REPEATS = 200, 1000, 3


class AdapterRefused(ValueError):
    """An adapter that can't be served; the text names what is wrong with it and what to do."""


@dataclass(slots=True, frozen=True)
class AdapterConfig:
    """What the configuration says of modules, ranks and scales. ``base``: the base model's name or folder,
    ``kind``: its model_type, as Cloudflare asks for it; "" where nothing is said.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: list[str] | str | None
    excluded: list[str] | str | None = None
    # Names of weights that PEFT adapts as they are, without a linear around them: those of experts and routers.
    parameters: tuple[str, ...] = ()
    # Numbers of layers, None: all; and names that they stand behind, (): any, None: an expression.
    layers: frozenset[int] | None = None
    layer_names: tuple[str, ...] | None = ()
    base: str = ""
    kind: str = ""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of modules; PEFT joins gates and ups of experts, and says twice the rank for what is joined."""
        return (self.rank, *(rank // (1 + is_joined(name)) for name, rank in self.rank_pattern.items()))

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) where the adapter is rank-stabilised (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def names(self, module: str) -> bool | None:
        """Whether the adapter is for this linear, as PEFT's ``check_target_module_exists`` has it; None where that
        depends on more than its name, or on an expression that may take long to match.
        """
        if _matches(self.excluded, module):
            return False
        if self.targets is None or self.targets == "all-linear":
            return None
        found = _matches(self.targets, module)
        if not found or isinstance(self.targets, str) or self.layers is None or module in self.targets:
            return found
        if self.layer_names is None:
            return None
        places = [rf"(?:^|.*?\.){name}" for name in self.layer_names] or [r".*?\.[^.]*"]
        at = next((hit for place in places if (hit := re.match(rf"{place}\.(\d+)\.", module))), None)
        return at is not None and int(at[1]) in self.layers

    def names_parameter(self, name: str) -> bool:
        """Whether the adapter is for this weight, by PEFT's ``target_parameters``."""
        return any(name == target or name.endswith("." + target) for target in self.parameters)

    def wrapped(self, module: str, own: Iterable[str]) -> list[str]:
        """Those of a module's ``own`` weights, in its order, that the adapter is for: PEFT wraps it once for each, the
        first one innermost.
        """
        return [name for name in own if self.names_parameter(f"{module}.{name}")]

    def require_target(self, module: str) -> None:
        """Refuses weights of a module that the configuration does not name: PEFT would leave them out."""
        if self.names(module) is False and not self.names_parameter(f"{module}.weight"):
            raise AdapterRefused(
                f"the adapter has weights for {module}, which target_modules in adapter_config.json does not name; "
                "upload the configuration that was saved with these weights"
            )


def read_config(data: bytes) -> AdapterConfig:
    """Raises :class:`AdapterRefused`."""
    if len(data) > MAX_BYTES:
        raise AdapterRefused(f"adapter_config.json has {len(data)} bytes, and {MAX_BYTES} are read; shorten it")
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # one half of a pair of surrogates is no text
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"adapter_config.json is no JSON ({error}); upload it again") from error
    if not isinstance(found, dict):
        raise AdapterRefused("adapter_config.json is no JSON object; upload the one that save_pretrained wrote")
    for name, allowed in _ONLY.items():
        if name in found and found[name] not in allowed:
            how = "LoraConfig" if name == "peft_type" else f"{name} left as PEFT has it"
            raise AdapterRefused(
                f"adapter_config.json has {name}: {_short(found[name])}, which is not served here; train with {how}"
            )
    if "peft_type" not in found:
        raise AdapterRefused('adapter_config.json has no peft_type; it must be "LORA"')
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterRefused(
            f"adapter_config.json has init_lora_weights: {_short(start)}, which changes the base model's weights; save "
            "the adapter with path_initial_model_for_weight_conversion"
        )
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = found.get(name)
        if not (value is None or isinstance(value, str) or _strings(value)):
            raise AdapterRefused(f"adapter_config.json: {name} must be a list of names or an expression")
    if not (found.get("target_parameters") is None or _strings(found["target_parameters"])):
        raise AdapterRefused("adapter_config.json: target_parameters must be a list of names")
    return AdapterConfig(
        rank=_rank("r", found.get("r", 8)),
        alpha=_alpha("lora_alpha", found.get("lora_alpha", 8)),
        rslora=found.get("use_rslora") is True,
        targets=found.get("target_modules"),
        excluded=found.get("exclude_modules"),
        parameters=tuple(found.get("target_parameters") or ()),
        layers=_layers(found.get("layers_to_transform")),
        layer_names=_layer_names(found.get("layers_pattern")),
        base=_text(found, "base_model_name_or_path"),
        kind=_text(found, "model_type"),
        rank_pattern={k: _rank(f"rank_pattern.{k}", v) for k, v in _pattern(found, "rank_pattern").items()},
        alpha_pattern={k: _alpha(f"alpha_pattern.{k}", v) for k, v in _pattern(found, "alpha_pattern").items()},
    )


def is_joined(name: str) -> bool:
    """Whether a weight, or the end of a pattern for it, is that of gates and ups side by side."""
    return name.endswith("gate_up_proj")


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST_RANK:
        raise AdapterRefused(f"adapter_config.json: {name} is {_short(value)}; a rank is from 1 to {LARGEST_RANK}")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST_ALPHA:
        raise AdapterRefused(f"adapter_config.json: {name} is {_short(value)}; it must be a number")
    return float(value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    listed = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in listed):
        raise AdapterRefused("adapter_config.json: layers_to_transform must be a number or a list of numbers")
    return frozenset(listed)


def _layer_names(value: Any) -> tuple[str, ...] | None:
    names = [value] if isinstance(value, str) else value or []
    return tuple(filter(None, names)) if all(re.fullmatch(r"\w*", name) for name in names) else None


def _text(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    return value if isinstance(value, str) else ""


def _matches(targets: list[str] | str | None, module: str) -> bool | None:
    """As PEFT compares: an expression for the whole name, or names that it ends with."""
    if not targets:
        return False
    if isinstance(targets, str):
        return None if _slow(targets) else re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith("." + target) for target in targets)


def _slow(pattern: str) -> bool:
    """Whether an expression may take long to match, or is none."""
    repeats = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{?]", pattern):
        return True
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return True
    return False


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _pattern(found: dict[str, Any], name: str) -> dict[str, Any]:
    patterns = found.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise AdapterRefused(f"adapter_config.json: {name} must be an object of at most {_MOST_PATTERNS} patterns")
    for pattern in patterns:
        if _slow(pattern) or _ending(pattern) is None:
            raise AdapterRefused(
                f"adapter_config.json: {name} has {_short(pattern)}, which is no expression or may take long to match; "
                "write names of modules"
            )
    return patterns


def _of_pattern(patterns: dict[str, T], module: str, otherwise: T) -> T:
    """As PEFT's ``get_pattern_key``: the first pattern that a name ends with."""
    for pattern, value in patterns.items():
        if (ending := _ending(pattern)) is not None and ending.match(module):
            return value
    return otherwise


@lru_cache(4096)
def _ending(pattern: str) -> re.Pattern[str] | None:
    """None where only the pattern by itself is an expression, as one that begins with flags."""
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
