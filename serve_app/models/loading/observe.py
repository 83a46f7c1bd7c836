"""What a model's attention really is: seen in one short pass, never taken from its configuration.

A configuration may say anything about heads and layers. What the cache must hold is what the layers hand over, so a few
tokens run through the model with an attention function that looks and attends densely.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.models import attention
from serve_app.models.attention import PagedLayer
from serve_app.models.compressed import compressed_layers
from serve_app.models.indexed import AnyMask, IndexedLayer, indexed_layers
from serve_app.models.latent import latent_of
from serve_app.models.stateful import StatefulLayer, keeps_states, showing, stateful_layers

TOKENS = 4
# Modules that remember more of a text than keys and values, by what their classes are called.
_STATEFUL = re.compile(
    "(?i:mamba|recurrent|rwkv|deltanet|gateddelta|linearattention|lightningattention|shortconv|rglru|[xms]lstm|kimidelta"
    "|retention|canon)|SSM|Ssm"  # letter for letter, as GptOssModel has them too
)


class Unservable(ValueError):
    """The model's layers do something that the paged cache does not hold; the text names it."""


@dataclass(slots=True)
class SeenLayer:
    """One layer's call of attention: its module and what it handed over beside the tensors. Or an indexer, with the
    keys that it keeps for itself, or a stream of entries. ``number``: of its layer in the whole model, which these come
    behind.
    """

    module: nn.Module
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    options: dict[str, Any]
    keys_alone: bool = False  # its values are its keys
    number: int = -1

    @property
    def shared(self) -> bool:
        """Whether its values are the first columns of its keys."""
        return self.keys_alone or latent_of(self.module) is not None

    @property
    def place(self) -> PagedLayer:
        """Its layer of the cache, once that is known."""
        return self.module.paged_layer  # type: ignore[return-value]


def observe(module: nn.Module, device: torch.device, *, coded: bool = False) -> tuple[list[SeenLayer], int]:
    """The attention layers of ``module`` in the order of the cache, each with its attribute ``paged_layer`` set, and
    the width of its logits. ``coded``: positions are those of :mod:`serve_app.models.longrope`.

    Raises :class:`Unservable` where not every layer's memory goes through transformers' attention interface.
    """
    states = stateful_layers(module)
    if not _keeps(module, states):  # what else one with states does between tokens is seen by comparing it
        refuse_state(module)
        refuse_positions(module)
    calls: list[SeenLayer] = []

    def looking(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Any:
        batch, q_heads, length, _ = query.shape
        if batch != 1 or length != TOKENS or key.shape[:1] + key.shape[2:3] != (1, TOKENS):
            raise Unservable(
                f"{type(layer).__name__} attends with queries {list(query.shape)} and keys {list(key.shape)} where the "
                f"text has {TOKENS} tokens; attention to something else than the text is not supported"
            )
        calls.append(SeenLayer(layer, q_heads, key.shape[1], key.shape[3], value.shape[3], options, value is key))
        if key.shape[1] == 0 or q_heads % key.shape[1] or value.shape[1] != key.shape[1]:
            raise Unservable(
                f"{type(layer).__name__} has {q_heads} query heads, {key.shape[1]} key and {value.shape[1]} value heads"
            )
        key, value = (x.repeat_interleave(q_heads // x.shape[1], 1) for x in (key, value))
        latent = latent_of(layer)
        query = query if latent is None else latent.absorb(query)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.get("scaling"))
        out = out.transpose(1, 2)
        return (out if latent is None else latent.expand(out[0]).unsqueeze(0)), None

    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, looking)
    try:
        with torch.inference_mode(), showing(states):
            positions = torch.arange(TOKENS, device=device)
            inputs, places = {"input_ids": positions[None] + 1}, positions[None] * (1 + coded)
            masks = masks_of(module, device)
            output = run(module, parameters_of(module), inputs, places, batch=None, rows=positions, **masks)
    finally:
        attention.register()
    return _placed(module, calls, keeps=_keeps(module, states)), int(output.logits.shape[-1])


def run(
    module: Any,
    takes: frozenset[str],
    inputs: dict[str, Tensor],
    positions: Tensor,
    *,
    batch: Any,
    rows: Tensor,
    **more: Any,
) -> Any:
    """The model's forward over a flat batch [1, T] of any of the models we take; logits are those of ``rows`` where the
    model can choose, of all tokens otherwise. ``takes`` is :func:`parameters_of` it."""
    if "logits_to_keep" in takes:
        more["logits_to_keep"] = rows
    if "**" in takes:
        more["batch"] = batch
    if "position_ids" in takes:
        more["position_ids"] = positions
    return module(**inputs, use_cache=False, **more)


def masks_of(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """What ``module.forward`` is given for its masks, where its code asks for some."""
    return {"attention_mask": AnyMask(device)} if indexed_layers(module) else {}


def parameters_of(module: nn.Module) -> frozenset[str]:
    """Names of what ``module.forward`` takes, ``**`` among them if it takes anything."""
    found = inspect.signature(module.forward).parameters.values()
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in found)


def _reads_text(module: Any) -> nn.Module:
    """The part that tokens go through: what sees or hears beside it has no state between tokens."""
    if module.config.get_text_config() is module.config:
        return module
    return module.get_decoder() or module


def refuse_state(module: nn.Module) -> None:
    """Raises :class:`Unservable` for a model with layers that keep more of a text than keys and values, where none of
    them keeps it in transformers' cache."""
    for child in _reads_text(module).modules():
        odd = "Indexer" in type(child).__name__ and not isinstance(child.forward, IndexedLayer)
        if odd or isinstance(child, nn.Conv1d) or _STATEFUL.search(type(child).__name__):
            raise Unservable(
                f"{type(child).__name__} keeps something of a text that is neither keys and values nor a state in "
                "transformers' cache; models with such layers are not supported yet"
            )
    config = module.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if strange := kinds & {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}:
        raise Unservable(f"layers of type {', '.join(sorted(strange))} keep no state in transformers' cache")


def refuse_positions(module: nn.Module) -> None:
    """Raises :class:`Unservable` for a model that counts positions itself, along the whole batch."""
    if "position_ids" not in parameters_of(module):
        raise Unservable(
            f"{type(module).__name__} takes no positions: it counts them along the batch, in which requests lie end to "
            "end"
        )


def _keeps(module: nn.Module, states: list[StatefulLayer]) -> bool:
    """Whether layers of the model keep states, here or on other ranks."""
    here = bool(states) or bool(compressed_layers(module))
    return here or (hasattr(module, "held_layers") and keeps_states(type(module)))


def _placed(module: nn.Module, calls: list[SeenLayer], *, keeps: bool) -> list[SeenLayer]:
    """The calls in order of their layers, each module with its place in the cache."""
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    every = getattr(config, "num_hidden_layers", None) or getattr(config, "num_layers", None) or len(calls)
    # Of a model that several ranks divide, some layers may be elsewhere (serve_app.models.divided).
    # Llama 3.2 Vision's that attend to pictures are left out of texts without any.
    left_out = getattr(config, "cross_attention_layers", None) or ()
    held = getattr(module, "held_layers", [i for i in range(max(every, len(calls))) if i not in left_out])
    if keeps:  # layers with a state, and those with neither, have no call
        held = sorted(getattr(call.module, "layer_idx", -1) for call in calls)
    expected = min(every, len(held))
    name = type(module).__name__
    if len(calls) < (not keeps) or len(calls) < expected:
        raise Unservable(
            f"{name}: {len(calls)} of {expected} layers use transformers' attention interface; what the others remember"
            " would not be in the paged cache"
        )
    by_index = {getattr(call.module, "layer_idx", None): call for call in calls}
    if len(by_index) != len(calls) or set(by_index) != set(held):
        raise Unservable(
            f"{name} calls attention {len(calls)} times in layers {', '.join(sorted(map(str, by_index))[:8])}; each "
            "call needs a layer of the cache to itself"
        )
    placed = [by_index[i] for i in held]
    carried = attention.Carrier()
    for index, call in enumerate(placed):
        layer = PagedLayer(index, chunk=_chunk(call.module, held[index]), carrier=carried)
        tuned = getattr(call.module, "attn_temperature_tuning", False) and not getattr(call.module, "use_rope", True)
        if tuned:
            # transformers counts these positions along the batch; the attention function has the requests' own.
            owner: Any = call.module
            layer.temperature = (float(owner.floor_scale), float(owner.attn_scale))
            owner.attn_temperature_tuning = False
        call.module.paged_layer = layer  # type: ignore[assignment]
        call.number = held[index]
    for indexer in indexed_layers(module):
        owner = indexer.module
        owner.paged_layer = PagedLayer(len(placed), carrier=carried)
        number = every + int(owner.layer_idx)
        placed.append(SeenLayer(owner, 1, 1, indexer.seen, indexer.seen, {}, keys_alone=True, number=number))
    streams = {
        every * (1 + kind) + int(compressor.owner.layer_idx): stream
        for compressor in compressed_layers(module)
        for kind, stream in enumerate(compressor.streams)
    }
    for number, stream in sorted(streams.items()):  # as caches on several ranks have them
        stream.place = PagedLayer(len(placed), carrier=carried)
        width = stream.cached_width
        placed.append(SeenLayer(stream.module, 1, 1, width, width, {}, keys_alone=True, number=number))
    return placed


def _chunk(module: nn.Module, index: int) -> int:
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or index >= len(kinds) or kinds[index] != "chunked_attention":
        return 0
    return int(getattr(config, "attention_chunk_size", 0) or 0)


def hands_batch_down(layers: list[SeenLayer]) -> bool:
    """Whether keyword arguments of the model's forward reach attention in every layer."""
    return all("batch" in layer.options for layer in layers)
