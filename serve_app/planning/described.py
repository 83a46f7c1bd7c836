"""A model as its configuration describes it, by transformers' own classes without memory. Imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.planning.formats import Format
from serve_app.planning.tensors import NoTensors, Tensor


def full_config(config: dict[str, Any]) -> Any:
    """transformers' configuration object with every default filled in. Raises :class:`NoTensors`."""
    from transformers import AutoConfig

    rest = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        return AutoConfig.for_model(config["model_type"], **rest)
    except Exception as error:  # configurations object in any way they like
        raise NoTensors(f"config.json is none of the installed transformers' ({str(error)[:200]})") from error


def describe(config: dict[str, Any], full: Any, stored_as: Format | None) -> list[Tensor]:
    """The tensors of the model that ``config`` describes, in 16 bits or as ``stored_as`` says. Raises
    :class:`NoTensors` where transformers builds none.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    names = config.get("architectures") or [""]
    model_class = getattr(transformers, names[0], None)
    if model_class is None:
        raise NoTensors(f"{names[0] or 'config.json'} names no architecture of the installed transformers")
    try:
        with torch.device("meta"), no_init_weights():
            module = model_class._from_config(full, dtype=torch.bfloat16)
        module.tie_weights()
    except Exception as error:  # models object in any way they like
        raise NoTensors(f"{names[0]} can't be built from config.json ({str(error)[:200]})") from error
    found = []
    for name, parameter in module.named_parameters():
        tensor = Tensor(name, parameter.numel(), parameter.numel() * 2, tuple(parameter.shape))
        if stored_as is not None and parameter.ndim > 1 and stored_as.holds(name, tensor.role):
            tensor = replace(tensor, bytes=int(tensor.values * stored_as.bits / 8))
        found.append(tensor)
    return found
