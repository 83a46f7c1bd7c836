"""From one of transformers' modules to a forward pass over our batches; whatever its weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from serve_app.engine.kv_cache import KVShape, LayerShape
from serve_app.engine.states import StateShape
from serve_app.models import longrope
from serve_app.models.attention import Carrier
from serve_app.models.compressed import with_streams, wrap_compressed
from serve_app.models.crossing import attend_beside
from serve_app.models.deepstack import add_behind_layers
from serve_app.models.indexed import wrap_indexed
from serve_app.models.latent import use_latents
from serve_app.models.loading.adapt import adapt
from serve_app.models.loading.observe import (
    SeenLayer,
    Unservable,
    hands_batch_down,
    masks_of,
    observe,
    parameters_of,
    run,
)
from serve_app.models.mixtures.experts import leave_odd_experts
from serve_app.models.stateful import shape_of, wrap_stateful

if TYPE_CHECKING:
    from serve_app.engine.step import Batch


@dataclass(slots=True)
class Prepared:
    """``extend_at``: length beyond which texts are rotated with other frequencies; ``recompute``: and computed anew."""

    forward: Callable[[Batch], Tensor]
    layers: list[SeenLayer]
    vocab_size: int
    extend_at: int | None
    recompute: bool
    states: StateShape
    stepwise: bool  # some layer computes a token alone otherwise than among others
    keeps: bool  # whether layers keep states, on other ranks if not here

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """A cache that holds what each layer hands over."""
        sizes = [LayerShape(seen.kv_heads, max(seen.key_dim, seen.value_dim), seen.shared) for seen in self.layers]
        return KVShape(tuple(sizes), dtype, states=self.states)


def prepare(module: nn.Module, device: torch.device, *, latents: bool = True) -> Prepared:
    """Makes ``module`` run on the paged cache; with ``latents`` that holds the latent of attention which has one.
    Raises :class:`Unservable`.
    """
    adapt(module)
    if latents:
        use_latents(module)
    leave_odd_experts(module)
    add_behind_layers(module)
    attend_beside(module)
    try:
        wrap_indexed(module)
        states, entries = wrap_stateful(module), wrap_compressed(module)
        extend_at = longrope.replace_rotary(module, generates=True)
        layers, vocab_size = observe(module, device, coded=extend_at is not None)
    except Unservable:
        raise
    except Exception as error:  # classes of models object in any way they like
        raise Unservable(f"it can't run on a flat batch ({type(error).__name__}: {error})") from error
    carriers = [] if hands_batch_down(layers) else [layers[0].place.carrier]
    carriers += [layer.carrier for layer in states[:1]] + [layer.carrier for layer in entries[:1]]
    forward = _forward(module, carriers, extend_at, masks_of(module, device))
    recompute = extend_at is not None and longrope.recomputes(module)
    stepwise = any(layer.stepwise for layer in states)
    shape, keeps = with_streams(shape_of(states), entries), bool(states) or bool(entries)
    return Prepared(forward, layers, vocab_size, extend_at, recompute, shape, stepwise, keeps)


def _forward(
    module: Any, carriers: list[Carrier], extend_at: int | None, masks: dict[str, Any]
) -> Callable[[Batch], Tensor]:
    """Logits [S, vocab] of ``batch.sample_rows``; ``carriers`` hold the batch for layers that are not handed it."""
    takes = parameters_of(module)
    chooses = "logits_to_keep" in takes

    def forward(batch: Batch) -> Tensor:
        capture = batch.capture
        positions = batch.positions
        if extend_at is not None:
            positions = longrope.coded(positions, batch.extended)
        more = masks if capture is None else masks | {"output_hidden_states": True}
        inputs = _inputs(module, batch)
        for carrier in carriers:
            carrier.batch = batch
        try:
            turned = positions.unsqueeze(0) if batch.axes is None else batch.axes.unsqueeze(1)
            output = run(module, takes, inputs, turned, batch=batch, rows=batch.sample_rows, **more)
        finally:
            for carrier in carriers:
                carrier.clear()
        if capture is not None:
            # hidden_states[i] is what enters layer i.
            capture.states = torch.stack([output.hidden_states[i][0] for i in capture.layers], 1)
        return output.logits[0] if chooses else output.logits[0][batch.sample_rows]

    return forward


def _inputs(module: Any, batch: Batch) -> dict[str, Tensor]:
    if batch.crossing is not None:
        # Anything, so that transformers runs these layers.
        return {"input_ids": batch.input_ids.unsqueeze(0), "cross_attention_states": batch.crossing.behind}
    if batch.embeddings is None:
        return {"input_ids": batch.input_ids.unsqueeze(0)}
    embedded = module.get_input_embeddings()(batch.input_ids)
    return {"inputs_embeds": batch.embeddings.put_into(embedded).unsqueeze(0)}
