"""A model as its configuration describes it, by transformers' own classes without memory. Imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.planning.formats import Format
from serve_app.planning.held import is_linear
from serve_app.planning.tensors import NoTensors, Tensor

if TYPE_CHECKING:
    from serve_app.models.encoding import Encoding
    from serve_app.models.needs import StateNeeds


def full_config(config: dict[str, Any]) -> Any:
    """transformers' configuration object with every default filled in. Raises :class:`NoTensors`."""
    from transformers import AutoConfig

    rest = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        return AutoConfig.for_model(config["model_type"], **_with_floats(rest))
    except Exception as error:  # configurations object in any way they like
        raise NoTensors(f"config.json is none of the installed transformers' ({str(error)[:200]})") from error


def _with_floats(values: Any) -> Any:
    """As transformers reads what JSON has no number for: ``{"__float__": "Infinity"}``."""
    if isinstance(values, list):
        return [_with_floats(value) for value in values]
    if not isinstance(values, dict):
        return values
    if values.keys() == {"__float__"}:
        return float(values["__float__"])
    return {key: _with_floats(value) for key, value in values.items()}


def class_of(config: dict[str, Any], full: Any) -> Any:
    """transformers' class of ``config``; None where it has none."""
    import transformers

    from serve_app.models.loading.folder import generating

    names = config.get("architectures") or [""]
    return getattr(transformers, names[0], None) or next(iter(generating(full)), None)


def without_weights(config: dict[str, Any], full: Any, dtype: str = "bfloat16") -> Any:
    """transformers' module of ``config``. Raises :class:`NoTensors` where transformers builds none."""
    import torch

    from serve_app.models.encoding import bare_module

    name, found = (config.get("architectures") or [""])[0], class_of(config, full)
    if found is None:
        raise NoTensors(f"{name or 'config.json'} names no architecture of the installed transformers")
    try:
        return bare_module(found.__name__, full, getattr(torch, dtype))
    except Exception as error:  # models object in any way they like
        raise NoTensors(f"{name} can't be built from config.json ({str(error)[:200]})") from error


class Described:
    """What ``config`` describes, with a module without weights that is built once, when it is asked for first."""

    def __init__(self, config: dict[str, Any], full: Any, dtype: str = "bfloat16") -> None:
        self.config, self.full, self.dtype = config, full, dtype

    @cached_property
    def module(self) -> Any:
        """Raises :class:`NoTensors`."""
        module = without_weights(self.config, self.full, self.dtype)
        module.tie_weights()
        return module

    @property
    def builds(self) -> bool:
        """Whether transformers builds it; if not, files alone say what it consists of."""
        try:
            return self.module is not None
        except NoTensors:
            return False

    @cached_property
    def aside(self) -> frozenset[str]:
        """Modules that see and hear, by the last part of their names, which files have as well."""
        from serve_app.models.divided.division import looking

        return frozenset(name.rpartition(".")[2] for name in looking(self.module)) if self.builds else frozenset()

    @cached_property
    def _names(self) -> tuple[Any, ...]:
        """By which transformers' loader finds a parameter for what a file calls otherwise."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        every = get_model_conversion_mapping(self.module)
        renamings = [each for each in every if isinstance(each, WeightRenaming)]
        converters = [each for each in every if not isinstance(each, WeightRenaming)]
        own = dict(self.module.named_parameters())
        return rename_source_key, renamings, converters, self.module.base_model_prefix, own

    def loaded_as(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """A file's tensors with the names of the parameters that they become, or are a part of."""
        if not self.builds:
            return list(tensors)
        rename, *how = self._names
        return [replace(each, name=rename(each.name, *how)[0]) for each in tensors]

    def read(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], int]:
        """Of a file's tensors those that are loaded, and the bytes of those that transformers leaves there (layers that
        draft)."""
        found = class_of(self.config, self.full)
        patterns = [re.compile(each) for each in getattr(found, "_keys_to_ignore_on_load_unexpected", None) or ()]
        own = {name for name, _ in self.module.named_parameters()} if patterns and self.builds else set()
        kept, left = [], 0
        for tensor in tensors:
            if tensor.name not in own and any(pattern.search(tensor.name) for pattern in patterns):
                left += tensor.bytes
            else:
                kept.append(self._seen(tensor))
        return kept, left

    def tensors(self, stored_as: Format | None = None) -> list[Tensor]:
        """Of the module, in 16 bits or as ``stored_as`` says. Raises :class:`NoTensors`."""
        found = []
        kinds = {f"{name}.{own}": _kind(each, own) for name, each in self.module.named_modules() for own in _own(each)}
        for name, parameter in self.module.named_parameters():
            shape, kind = tuple(parameter.shape), kinds[name]
            tensor = Tensor(name, parameter.numel(), parameter.numel() * 2, shape, kind=kind)
            if stored_as is not None and is_linear(tensor) and stored_as.holds(name, tensor.role):
                tensor = replace(tensor, bytes=int(tensor.values * stored_as.bits_of(tensor.role) / 8))
            found.append(self._seen(tensor))
        return found

    def _seen(self, tensor: Tensor) -> Tensor:
        return replace(tensor, aside=not self.aside.isdisjoint(tensor.name.split(".")))


def _own(module: Any) -> Iterable[str]:
    return (name for name, _ in module.named_parameters(recurse=False))


def _kind(module: Any, name: str) -> str:
    """:attr:`Tensor.kind` of a module's parameter, by the rules of what rounds and packs linears and experts."""
    from torch import nn

    from serve_app.models.linears import is_linear
    from serve_app.models.quantization import rounds_experts

    if getattr(module, name).ndim == 3 and rounds_experts(module):
        return "linear"
    if name != "weight":
        return "other"
    if type(module) is nn.Linear:
        return "linear"
    return "packed" if is_linear(module) else "other"


def states(described: Described) -> StateNeeds | None:
    """Of a model whose layers keep states. Raises :class:`NoTensors`."""
    import torch
    import transformers

    from serve_app.models.needs import state_needs
    from serve_app.models.stateful import keeps_states

    found = getattr(transformers, (described.config.get("architectures") or [""])[0], None)
    if found is None or not keeps_states(found):
        return None
    module, hidden = described.module, int(described.full.get_text_config().hidden_size)
    try:
        return state_needs(module, hidden, getattr(torch, described.dtype))
    except Exception as error:  # models object in any way they like
        raise NoTensors(f"what its layers keep can't be told from config.json ({str(error)[:200]})") from error


@dataclass(slots=True, frozen=True)
class Cuts:
    """Of a model whose layers keep states, or choose keys: the tensors of layers that ranks do not divide, and those
    whose results come together again at once, by :attr:`Tensor.below`. ``roles``: of which ranks divide nothing, in
    layers, as files may call tensors otherwise. Or why they can't divide its layers.
    """

    whole: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    roles: frozenset[tuple[str, int | None]] = frozenset()
    reason: str = ""


def cuts_of(described: Described) -> Cuts:
    """Raises :class:`NoTensors`."""
    from serve_app.models.divided.division import divide
    from serve_app.models.loading.folder import UnsupportedModel
    from serve_app.parallel.place import Place

    module = described.module
    try:
        found = divide(module, Place(2))
    except UnsupportedModel as reason:
        return Cuts(reason=str(reason))
    whole = {name for name, _ in module.named_parameters()} - {*found.cuts, *_weights(found.few)}
    every = [Tensor(name, 0, 0) for name, _ in module.named_parameters()]
    divided = {(each.role, each.layer) for each in every if each.name not in whole}
    roles = frozenset((each.role, each.layer) for each in every) - divided
    return Cuts(_below(whole), _below(_weights(found.joined)), roles)


def _below(names: Iterable[str]) -> frozenset[str]:
    """Of the text model's layers: what sees has layers with the same numbers."""
    found = (Tensor(name, 0, 0) for name in names)
    return frozenset(each.below for each in found if each.layer is not None)


def _weights(modules: Iterable[str]) -> set[str]:
    return {f"{name}.weight" for name in modules}


def encoded(described: Described, folder: Path | None) -> dict[str, Encoding]:
    """What encoding takes of each medium that the model is served with. Raises :class:`NoTensors`."""
    from serve_app.models.encoding import FAMILIES, encodings, read_settings

    if described.config["model_type"] not in FAMILIES:
        return {}
    module, text = described.module, described.full.get_text_config()
    try:
        settings = read_settings(folder) if folder is not None else {}
        return encodings(module, settings, getattr(text, "max_position_embeddings", None) or 1 << 20)
    except Exception as error:  # encoders object in any way they like
        raise NoTensors(f"what encoding takes can't be told from config.json ({str(error)[:200]})") from error
