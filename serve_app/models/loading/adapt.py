"""Models whose attention does not go through transformers' interface although it is plain: their methods replaced.

Older modelling code splits heads, rotates and attends in one method. Where the part that attends can be replaced, the
model is served; each adapter is a few lines, and the check at load compares it with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from serve_app.models import attention
from serve_app.models.loading.observe import Unservable


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Through the interface, whatever function it holds: [1, Hq, T, D] -> [1, T, Hq, D]."""
    from transformers import AttentionInterface

    return AttentionInterface()[attention.NAME](module, query, key, value, None, **options)[0]


def _split_attention(scale: Callable[[Any], float]) -> Callable[[nn.Module], None]:
    """For modules whose ``_attn(query, key, value, mask)`` does nothing but attend."""

    def adapt(module: Any) -> None:
        if not hasattr(module, "layer_idx"):
            module.layer_idx = module.layer_id

        def attn(
            self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
        ) -> tuple[Tensor, None]:
            window = self.config.window_size if getattr(self, "attention_type", "") == "local" else None
            out = _attend(self, query, key, value, scaling=scale(self), sliding_window=window)
            return out.transpose(1, 2).to(value.dtype), None

        module._attn = MethodType(attn, module)

    return adapt


def _falcon(module: Any) -> None:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any = None,
        position_embeddings: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if alibi is not None:
            raise Unservable("attention with ALiBi biases is not supported by the paged cache")
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if self.new_decoder_architecture:
            # Its split repeats each K/V head for the queries of its group: one of them is enough for the cache.
            group = self.num_heads // self.num_kv_heads
            key, value = key[:, ::group], value[:, ::group]
        out = _attend(self, query, key, value, scaling=self.head_dim**-0.5)
        return self.dense(out.flatten(2)), None

    module.forward = MethodType(forward, module)


# Class of the attention module -> what makes it go through the interface.
ADAPTERS: dict[str, Callable[[nn.Module], None]] = {
    "FalconAttention": _falcon,
    "GPTJAttention": _split_attention(lambda module: 1.0 / float(module.scale_attn)),
    "CodeGenAttention": _split_attention(lambda module: 1.0 / float(module.scale_attn)),
    "GPTNeoSelfAttention": _split_attention(lambda module: 1.0),
}
# Architectures that need an adapter; they are built with their own attention first.
ADAPTED = {"FalconForCausalLM", "GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM"}


def adapt(module: nn.Module) -> None:
    """Makes a model of :data:`ADAPTED` attend through transformers' interface, under our function's name."""
    if type(module).__name__ not in ADAPTED:
        return
    for child in module.modules():
        if (adapter := ADAPTERS.get(type(child).__name__)) is not None:
            adapter(child)
    module.config._attn_implementation = attention.NAME  # type: ignore[union-attr]  # no masks are made from here on


def reading(model_class: Any, dtype: Any) -> dict[str, Any]:
    """How transformers' ``from_pretrained`` reads every model: on our attention, from this machine's safetensors alone,
    without code from the folder. Sizes that differ are told and not an error of its own, so that they can be refused by
    name.
    """
    return {
        "attn_implementation": own_attention(model_class.__name__),
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }


def own_attention(class_name: str) -> str:
    """The attention implementation that an architecture is built with."""
    return "eager" if class_name in ADAPTED else attention.NAME
