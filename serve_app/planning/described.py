"""A model as its configuration describes it, by transformers' own classes without memory. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.planning.formats import Format
from serve_app.planning.tensors import NoTensors, Tensor

if TYPE_CHECKING:
    from serve_app.models.encoding import Encoding
    from serve_app.models.stateful import StateNeeds


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


def without_weights(config: dict[str, Any], full: Any, dtype: str = "bfloat16") -> Any:
    """transformers' module of ``config``. Raises :class:`NoTensors` where transformers builds none."""
    import torch
    import transformers

    from serve_app.models.encoding import bare_module
    from serve_app.models.loading.folder import generating

    names = config.get("architectures") or [""]
    found = getattr(transformers, names[0], None) or next(iter(generating(full)), None)
    if found is None:
        raise NoTensors(f"{names[0] or 'config.json'} names no architecture of the installed transformers")
    try:
        return bare_module(found.__name__, full, getattr(torch, dtype))
    except Exception as error:  # models object in any way they like
        raise NoTensors(f"{names[0]} can't be built from config.json ({str(error)[:200]})") from error


def states(config: dict[str, Any], full: Any, dtype: str) -> StateNeeds | None:
    """Of a model whose layers keep states. Raises :class:`NoTensors`."""
    import torch
    import transformers

    from serve_app.models.stateful import keeps_states, state_needs

    found = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if found is None or not keeps_states(found):
        return None
    module = without_weights(config, full, dtype)
    try:
        return state_needs(module, int(full.get_text_config().hidden_size), getattr(torch, dtype))
    except Exception as error:  # models object in any way they like
        raise NoTensors(f"what its layers keep can't be told from config.json ({str(error)[:200]})") from error


@dataclass(slots=True, frozen=True)
class Cuts:
    """Of a model whose layers keep states: the tensors of layers that ranks do not divide, those whose results come
    together again at once, by :attr:`Tensor.below`, and layers of which ranks divide nothing that mixes tokens; or why
    they can't divide its layers.
    """

    whole: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    layers: frozenset[int | None] = frozenset()
    reason: str = ""


def cuts_of(config: dict[str, Any], full: Any, dtype: str) -> Cuts:
    """Raises :class:`NoTensors`."""
    from serve_app.models.divided.division import divide
    from serve_app.models.loading.folder import UnsupportedModel
    from serve_app.parallel.place import Place

    module = without_weights(config, full, dtype)
    try:
        found = divide(module, Place(2))
    except UnsupportedModel as reason:
        return Cuts(reason=str(reason))
    whole = {name for name, _ in module.named_parameters()} - {*found.cuts, *_weights(found.few)}
    mixing = [Tensor(name, 0, 0) for name, _ in module.named_parameters()]
    mixing = [each for each in mixing if each.role == "attention"]
    divided = {each.layer for each in mixing if each.name not in whole}
    layers = frozenset(each.layer for each in mixing) - divided
    return Cuts(_below(whole), _below(_weights(found.joined)), layers)


def _below(names: Iterable[str]) -> frozenset[str]:
    return frozenset(Tensor(name, 0, 0).below for name in names)


def _weights(modules: Iterable[str]) -> set[str]:
    return {f"{name}.weight" for name in modules}


def encoded(config: dict[str, Any], full: Any, folder: Path | None, dtype: str) -> dict[str, Encoding]:
    """What encoding takes of each medium that the model is served with. Raises :class:`NoTensors`."""
    from serve_app.models.encoding import FAMILIES, encodings, read_settings

    if config["model_type"] not in FAMILIES:
        return {}
    module, text = without_weights(config, full, dtype), full.get_text_config()
    try:
        settings = read_settings(folder) if folder is not None else {}
        return encodings(module, settings, getattr(text, "max_position_embeddings", None) or 1 << 20)
    except Exception as error:  # encoders object in any way they like
        raise NoTensors(f"what encoding takes can't be told from config.json ({str(error)[:200]})") from error


def describe(config: dict[str, Any], full: Any, stored_as: Format | None) -> list[Tensor]:
    """The tensors of the model that ``config`` describes, in 16 bits or as ``stored_as`` says. Raises
    :class:`NoTensors` where transformers builds none.
    """
    module = without_weights(config, full)
    module.tie_weights()
    found = []
    for name, parameter in module.named_parameters():
        tensor = Tensor(name, parameter.numel(), parameter.numel() * 2, tuple(parameter.shape))
        if stored_as is not None and parameter.ndim > 1 and stored_as.holds(name, tensor.role):
            tensor = replace(tensor, bytes=int(tensor.values * stored_as.bits / 8))
        found.append(tensor)
    return found
