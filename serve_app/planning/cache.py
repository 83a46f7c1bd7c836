"""Keys and values of each layer, from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True, frozen=True)
class LayerCache:
    """One layer's memory of a text. ``heads``: parts that ranks may divide among them, each of ``head_bytes`` a token;
    one of ``rest`` bytes a token is every rank's (latents). ``bound``: tokens back to which queries look, 0 for all.
    ``state``: bytes a text, whatever its length. ``chosen``: tokens that a query attends to where it does not attend to
    all of them; of ``rest`` so many bytes, ``indexed``, are what they are chosen by.
    """

    kind: str
    heads: int = 0
    head_bytes: int = 0
    rest: int = 0
    bound: int = 0
    state: int = 0
    chosen: int = 0
    indexed: int = 0

    @property
    def token_bytes(self) -> int:
        """Of one token, on all ranks together where nothing lies twice."""
        return self.heads * self.head_bytes + self.rest

    def on_every_rank(self) -> LayerCache:
        """The same where ranks do not divide its heads."""
        return replace(self, heads=0, head_bytes=0, rest=self.token_bytes)

    def rank_bytes(self, ranks: int) -> int:
        """Of one token on each of ``ranks`` that divide the heads; fewer heads than ranks lie on several."""
        return -(-self.heads // ranks) * self.head_bytes + self.rest

    def text_bytes(self, tokens: int, ranks: int = 1) -> int:
        """Of a text on one rank, where tokens that no query looks back to are forgotten."""
        return (min(tokens, self.bound) if self.bound else tokens) * self.rank_bytes(ranks) + self.state

    def read_bytes(self, tokens: int, ranks: int = 1) -> int:
        """What one query of a text reads of it on one rank."""
        if not self.chosen or tokens <= self.chosen:
            return self.text_bytes(tokens, ranks)
        return self.chosen * (self.rank_bytes(ranks) - self.indexed) + tokens * self.indexed + self.state


BLOCK_TOKENS = 32  # of serve_app/engine/blocks.py
# Kinds of layers without keys and values.
_WITHOUT = {"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"}


def layer_caches(full: Any, item: float, *, latent: bool, states: Mapping[int, int] | None = None) -> list[LayerCache]:
    """``full``: transformers' configuration with its defaults; ``item``: bytes of a number. ``latent``: whether a
    layer with latent attention keeps the latent (DeepSeek-V2, arXiv 2405.04434, section 2.1.4) or every head's keys and
    values, each as wide as the wider of the two. ``states``: bytes of a text's state by layer.
    """
    text = full.get_text_config()
    count = int(_first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    kinds = list(getattr(text, "layer_types", None) or [])
    if len(kinds) != count:
        kinds = [_whole_model(text)] * count
    found = [_layer(own, kind, item, latent) for own, kind in zip(by_layer(text, count), kinds, strict=True)]
    keys = [int(_index_keys(text, index) * item) for index in range(count)]
    # Of entries that stand for several tokens no layer chooses by keys of these.
    chosen = int(text.index_topk) if any(keys) else 0
    return [
        replace(
            layer, state=(states or {}).get(index, 0), rest=layer.rest + keys[index], indexed=keys[index],
            chosen=chosen if layer.token_bytes else 0,
        )
        for index, layer in enumerate(found)
    ]  # fmt: skip


def by_layer(text: Any, count: int) -> list[Any]:
    """Each layer's configuration, where layers differ in more than their kind (Gemma 4)."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * count


def has_latents(full: Any) -> bool:
    """Whether its layers make keys and values of a latent."""
    text = full.get_text_config()
    return bool(getattr(text, "kv_lora_rank", None)) and getattr(text, "qk_rope_head_dim", None) is not None


def has_indexers(full: Any) -> bool:
    """Whether its layers choose the keys that they attend to (:mod:`serve_app.models.indexed`)."""
    text = full.get_text_config()
    return bool(getattr(text, "index_topk", None) and getattr(text, "index_head_dim", None))


def _index_keys(text: Any, layer: int) -> int:
    """Numbers of a token that the layer's indexer keeps, where it has one."""
    width = getattr(text, "index_head_dim", None)
    if not width or not getattr(text, "index_topk", None) or getattr(text, "compress_rates", None):
        return 0
    kinds, own = getattr(text, "layer_types", None), getattr(text, "indexer_types", None)
    if (kinds and kinds[layer] in _WITHOUT) or (own and own[layer] != "full"):
        return 0
    # Of pools also what weighs tokens in them, and whether a token is one.
    return 2 * int(width) + 1 if getattr(text, "index_kpool", None) else int(width)


def _whole_model(text: Any) -> str:
    return "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"


def _layer(text: Any, kind: str, item: float, latent: bool) -> LayerCache:
    if kind in _WITHOUT:
        return LayerCache(kind)
    bound = 0
    if kind == "sliding_attention":
        bound = int(_first(text, "sliding_window", "window_size") or 0)
    elif kind == "chunked_attention":
        bound = int(getattr(text, "attention_chunk_size", 0) or 0)
    if rates := getattr(text, "compress_rates", None):
        return LayerCache(kind, rest=int(_compressed(text, kind, rates.get(kind, 0)) * item))
    query_heads = int(_first(text, "num_attention_heads", "n_head", "n_heads"))
    rank = getattr(text, "kv_lora_rank", None)
    rotated = getattr(text, "qk_rope_head_dim", None)
    if rank and rotated is not None:
        if latent:
            return LayerCache("latent", rest=int((rank + rotated) * item), bound=bound)
        widest = max(rotated + text.qk_nope_head_dim, text.v_head_dim)
        return LayerCache(kind, query_heads, int(2 * widest * item), bound=bound)
    heads = int(_first(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or query_heads)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        heads = 1
    hidden = int(_first(text, "hidden_size", "n_embd", "d_model"))
    dim = int(_first(text, "head_dim", "kv_channels") or hidden // query_heads)
    if kind == "full_attention" and getattr(text, "global_head_dim", None):
        dim = int(text.global_head_dim)
        heads = int(getattr(text, "num_global_key_value_heads", None) or heads)
    return LayerCache(kind, heads, int(2 * dim * item), bound=bound)


def _compressed(text: Any, kind: str, ratio: int) -> int:
    """Numbers of a token in a layer whose keys are their own values, beside which an entry stands for every ``ratio``
    tokens (:mod:`serve_app.models.compressed`), and one more where an indexer chooses these.
    """
    widths = [int(text.head_dim)] if ratio else []
    widths += [int(text.index_head_dim)] if kind == "compressed_sparse_attention" else []
    a_block = max(1, BLOCK_TOKENS // ratio) if ratio else 0
    return int(text.head_dim) + sum(-(-a_block * width // BLOCK_TOKENS) for width in widths)


def _first(text: Any, *names: str) -> Any:
    """The first of several spellings that has a value."""
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)
