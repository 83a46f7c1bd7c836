"""Layers that attend to pictures beside the text, as Llama 3.2 Vision's do: their part of a pass, and what they make of
a picture (:mod:`serve_app.engine.crossing`).

transformers leaves these layers out of a pass without pictures. In a batch with some they run on the rows of requests
that have any; their modules are transformers' own, but for the attention itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.models.media import Encoded

# By `model_type`.
KNOWN = frozenset({"mllama"})


def crossing_layers(module: Any) -> list[Any]:
    """The layers of a model that attend to pictures beside the text."""
    if module.config.model_type not in KNOWN:
        return []
    text = module.model.language_model
    return [text.layers[index] for index in text.cross_attention_layers]


def attend_beside(module: nn.Module) -> None:
    """Makes these layers run on what a batch brings for them."""
    for number, layer in enumerate(crossing_layers(module)):
        layer.forward = partial(_cross, layer.forward)
        layer.cross_attn.forward = partial(_attend, layer.cross_attn, number)


def _cross(own: Any, states: Tensor, *, batch: Any, cross_attention_states: Tensor, **_: Any) -> Tensor:
    crossing = batch.crossing
    found = own(
        states[:, crossing.rows], cross_attention_states, None, None, crossing.behind.to(states.dtype), batch=batch
    )
    return states.index_copy(1, crossing.rows, found)


def _attend(attention: Any, number: int, hidden_states: Tensor, *, batch: Any, **_: Any) -> tuple[Tensor, None]:
    q = attention.q_norm(attention.q_proj(hidden_states[0]).unflatten(-1, (attention.num_heads, -1)))
    out: Tensor = attention.o_proj(batch.crossing.attend(number, q, attention.scaling).flatten(1))
    return out[None], None


@dataclass(slots=True)
class CrossedEncoder:
    """See :class:`~serve_app.models.media.MediaEncoder`. A picture's one feature is all that its layers keep of it:
    [1, layers, 2, Hkv, places, D]."""

    module: Any
    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    grids: bool = False
    beside: bool = True

    @property
    def place_bytes(self) -> int:
        """Of a picture, with padding up to the most tiles."""
        layers, seen = crossing_layers(self.module), self.module.config.vision_config
        places = seen.max_num_tiles * ((seen.image_size // seen.patch_size) ** 2 + 1)
        width = sum(2 * layer.cross_attn.num_key_value_heads * layer.cross_attn.head_dim for layer in layers)
        return int(places * width * self.module.dtype.itemsize)

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[dict[str, Tensor]]) -> list[Encoded]:
        """Of each picture, as the processor makes it, what it becomes."""
        model, device, dtype = self.module.model, self.module.device, self.module.dtype
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        batch = {name: torch.stack([picture[name] for picture in pictures]).to(device) for name in names}
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
        seen = model.vision_model(**batch, return_dict=True).last_hidden_state
        used = batch["aspect_ratio_mask"].flatten(1).sum(1) * seen.shape[3]
        states = model.multi_modal_projector(seen).flatten(1, 3)
        layers = [_keys_values(layer.cross_attn, states) for layer in crossing_layers(self.module)]
        found = torch.stack(layers, 1)[:, None].to(dtype)
        alone = found if len(pictures) == 1 else [own.clone() for own in found]
        return [Encoded(own, used=count) for own, count in zip(alone, used.tolist(), strict=True)]


def _keys_values(attention: Any, states: Tensor) -> Tensor:
    """[pictures, 2, Hkv, places, D] of ``states`` [pictures, places, hidden]."""
    heads = attention.num_key_value_heads
    keys = attention.k_norm(attention.k_proj(states).unflatten(-1, (heads, -1)))
    values = attention.v_proj(states).unflatten(-1, (heads, -1))
    return torch.stack([keys, values], 1).transpose(2, 3)


def crossed_encoder(module: nn.Module) -> CrossedEncoder | None:
    """The encoder of a loaded model whose layers attend to pictures beside the text."""
    owner: Any = module
    if not crossing_layers(owner):
        return None
    owner.model.vision_model.set_attn_implementation("sdpa")
    return CrossedEncoder(owner)
