"""What a plan knows of a model: its tensors, what its layers remember, and the few sizes that rates follow from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve_app.parallel.stages import following
from serve_app.planning.cache import LayerCache, _first, by_layer, has_latents
from serve_app.planning.choosing import Choosing, choosing_of
from serve_app.planning.formats import Format
from serve_app.planning.tensors import Tensor
from serve_app.planning.wanted import Wanted

if TYPE_CHECKING:
    from serve_app.models.encoding import Encoding


@dataclass(slots=True)
class RoleWeights:
    """Tensors of one role in one layer, or beside the layers. ``keys``: of the bytes, those that make keys and
    values. ``passing``: beside the bytes, those that are let go once the model is loaded.
    """

    values: int = 0
    bytes: int = 0
    keys: int = 0
    passing: int = 0

    def add(self, tensor: Tensor) -> None:
        self.values += tensor.values
        self.bytes += tensor.bytes
        self.keys += tensor.bytes if tensor.makes_keys else 0
        self.passing += tensor.passing


WeightsByRole = dict[str, RoleWeights]


@dataclass(slots=True)
class Model:
    """``layers`` and ``caches`` have one entry a layer; ``outer`` is what stands before and behind them. ``experts`` of
    which ``chosen`` compute for a token (0 for none). ``media``: what encoding takes of each medium that is served.
    """

    name: str
    layers: list[WeightsByRole]
    outer: WeightsByRole
    caches: list[LayerCache]
    hidden: int
    inner: int
    heads: int
    head_dim: int
    vocab: int
    experts: int
    chosen: int
    moe_inner: int
    context: int
    tied: bool
    dropped: int  # bytes of layers that are in the files and are not served, as those that draft
    media: dict[str, Encoding] = field(default_factory=dict)
    # Bytes that a step takes within a layer with a state: at all, and for each row.
    recurrence: tuple[float, float] = (0.0, 0.0)
    choosing: Choosing | None = None
    streams: int = 1  # of each row between layers
    # Layers that stay with the one before them (serve_app/parallel/stages.py).
    follows: list[bool] = field(default_factory=list)
    # Why ranks can't divide its layers, where that is so.
    undivided: str = ""
    stored_as: Format | None = None  # of which a GPU keeps some and unpacks the rest
    item: int = 2  # bytes of a number that layers compute with
    wanted: Wanted = field(default_factory=Wanted)  # beside weights, of its workers

    @property
    def state_bytes(self) -> int:
        """What layers keep of one text beside keys and values, however long it is."""
        return sum(cache.state for cache in self.caches)

    @property
    def weight_bytes(self) -> int:
        return sum(part.bytes for parts in (*self.layers, self.outer) for part in parts.values())

    @property
    def values(self) -> int:
        return sum(part.values for parts in (*self.layers, self.outer) for part in parts.values())

    @property
    def active_values(self) -> float:
        """Weights that one token's row is multiplied with."""
        share = self.chosen / self.experts if self.experts else 1.0
        total = 0.0
        for parts in (*self.layers, self.outer):
            for role, part in parts.items():
                if role not in ("embedding", "vision"):
                    total += part.values * (share if role == "experts" else 1.0)
        return total + (self.outer["embedding"].values if self.tied and "embedding" in self.outer else 0)

    def by_role(self) -> dict[str, int]:
        """Bytes of weights, most first."""
        found: dict[str, int] = defaultdict(int)
        for parts in (*self.layers, self.outer):
            for role, part in parts.items():
                found[role] += part.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def build(name: str, full: Any, tensors: Iterable[Tensor], caches: list[LayerCache]) -> Model:
    """``full``: transformers' configuration with its defaults."""
    text = full.get_text_config()
    layers: list[WeightsByRole] = [defaultdict(RoleWeights) for _ in caches]
    outer: WeightsByRole = defaultdict(RoleWeights)
    dropped = 0
    for tensor in tensors:
        if tensor.layer is not None and tensor.layer >= len(layers):
            dropped += tensor.bytes
            continue
        (outer if tensor.layer is None else layers[tensor.layer])[tensor.role].add(tensor)
    hidden = int(_first(text, "hidden_size", "n_embd", "d_model"))
    heads = int(
        _first(text, "num_attention_heads", "n_head", "n_heads") or 1
    )  # none where all layers keep states alone
    experts = int(_first(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0)
    named = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token", "moe_topk", "top_k_experts")
    chosen = int(_first(text, *named) or 0)
    widest = max(int(_first(own, "head_dim") or hidden // heads) for own in by_layer(text, 1))
    if has_latents(full):  # of which head_dim is what is rotated
        widest = max(int(text.qk_nope_head_dim + text.qk_rope_head_dim), int(text.v_head_dim))
    inner = int(_first(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden)
    return Model(
        name=name, layers=layers, outer=outer, caches=caches, hidden=hidden, inner=inner, heads=heads,
        head_dim=widest, vocab=int(text.vocab_size),
        experts=experts, chosen=chosen, moe_inner=int(_first(text, "moe_intermediate_size") or inner),
        context=int(_first(text, "max_position_embeddings", "n_positions", "max_seq_len") or 0),
        tied="head" not in outer, dropped=dropped, choosing=choosing_of(full, caches),
        streams=int(_first(text, "hc_mult") or 1), follows=following(text),
    )  # fmt: skip
