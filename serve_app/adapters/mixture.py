"""What the weights of an adapter are for, by their names in the file: a linear, or the weights of a mixture.

transformers 5 holds the weights of all experts of a layer in one parameter. PEFT adapts those as they are
(``target_parameters``): it wraps the module that has them once for each, so that the names in the file say how deep,
not which. Adapters from before have a linear for each expert, which PEFT joins when it loads them, as is done here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from serve_app.adapters.config import AdapterConfig, AdapterRefused

# The weights that modules have themselves, by module, in the order of the module.
Owners = Mapping[str, Collection[str]]
_LAYER = ".base_layer"
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")
# Of a linear for each expert, which weight it is a part of now, and which half.
_PROJECTIONS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": -1, "w2": -1}
JOINED, UP, DOWN, WEIGHT = "gate_up_proj", "up_proj", "down_proj", "weight"


@dataclass(slots=True, frozen=True)
class Target:
    """``name``: of the linear, or of the weight. ``key``: what the configuration's ranks, scales and targets are looked
    up by. ``owned``: it is the weight of a module that is no linear. ``expert``: which expert's linear the file has,
    -1: that of all. ``half``: 0 for gates, 1 for ups, where the file has each by itself.
    """

    name: str
    key: str
    owned: bool = False
    expert: int = -1
    half: int = -1


def target_of(module: str, config: AdapterConfig, owners: Owners) -> Target:
    """What the A and B of ``module``, as the file names it, are for. Raises :class:`AdapterRefused`."""
    inner = module
    while inner.endswith(_LAYER):
        inner = inner[: -len(_LAYER)]
    place = _now(inner)
    if place in owners:
        return _owned(module, place, (len(module) - len(inner)) // len(_LAYER), config, owners[place])
    if (found := _EXPERT.fullmatch(inner)) and (place := f"{_now(found[1])}.experts") in owners:
        return _of_expert(inner, place, int(found[2]), found[3], owners[place])
    if config.names(module) is False and config.names_parameter(f"{module}.{WEIGHT}"):
        return Target(module, f"{module}.{WEIGHT}")
    return Target(module, module)


def _now(name: str) -> str:
    """Mixtral's layers had another name before transformers 5."""
    return re.sub(r"\.block_sparse_moe(?=\.|$)", ".mlp", name)


def _owned(module: str, place: str, depth: int, config: AdapterConfig, own: Collection[str]) -> Target:
    wrapped = config.wrapped(place, own)
    if not wrapped and WEIGHT in own and config.names(module):  # a router, which was a linear before
        wrapped = [WEIGHT]
    if depth >= len(wrapped):
        raise AdapterRefused(
            f"the adapter has weights for {module}, which target_parameters in adapter_config.json does not name; "
            "upload the configuration that was saved with these weights"
        )
    name = f"{place}.{wrapped[-1 - depth]}"
    return Target(name, name, owned=True)


def _of_expert(module: str, place: str, expert: int, projection: str, own: Collection[str]) -> Target:
    half = _PROJECTIONS.get(projection)
    if half is None or any(name.endswith("_bias") for name in own):
        raise AdapterRefused(f"{module} is no linear of an expert that is known here; train with a newer peft")
    if half < 0 or JOINED not in own:
        return Target(f"{place}.{DOWN if half < 0 else UP}", module, True, expert)
    return Target(f"{place}.{JOINED}", module, True, expert, half)


def require_all(targets: Iterable[Target], experts: Mapping[str, int]) -> None:
    """Refuses files that have linears of some experts of a layer only. ``experts``: how many there are, by weight."""
    there: dict[tuple[str, int], set[int]] = {}
    for target in targets:
        if target.expert >= 0:
            there.setdefault((target.name, target.half), set()).add(target.expert)
    for (name, _), found in there.items():
        if found != set(range(experts[name])):
            raise AdapterRefused(
                f"the adapter has weights for {len(found)} of {name}'s {experts[name]} experts; target all of them"
            )
