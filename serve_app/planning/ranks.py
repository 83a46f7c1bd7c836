"""A model divided among ranks: which bytes each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.parallel.stages import stages
from serve_app.planning.choosing import choosing_bytes
from serve_app.planning.model import Model, RoleWeights, WeightsByRole
from serve_app.planning.tensors import UNDIVIDED, VISION

# Every rank of a stage has all of these. What is left is divided: columns or rows of matrices, heads, experts, the
# vocabulary. Projections into a latent are divided by their inputs, and a small all-reduce adds their results.
WHOLE = ("norms", "routers", "indexers", "others", UNDIVIDED)
# Rows that travel go through shared experts on their own rank, and routed ones may have copies.
SHARED, EXPERTS = "shared experts", "experts"
DRAWN_AT_ONCE = 1 << 23  # serve_app/engine/sampling.py has the same


class DoesNotDivide(ValueError):
    """The model has no such split; the text says what does not divide."""


@dataclass(slots=True, frozen=True)
class Split:
    """``tensor`` ranks divide each layer, ``pipeline`` stages divide the layers; ``expert``: whether the ranks of a
    stage hold whole experts (else a part of each), to which rows always ``travel``, and ``copies`` of which each rank
    has beyond its share. ``replicas`` of all that stand side by side.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    replicas: int = 1
    travel: bool = False
    copies: int = 0

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        named = [f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        named += ["experts whole"] if self.expert else []
        named += ["rows travel"] if self.travel else []
        named += [f"{self.copies} copies of experts a rank"] if self.copies else []
        return ", ".join(named) + (f", {self.replicas} replicas" if self.replicas > 1 else "")


@dataclass(slots=True)
class Rank:
    """Bytes of the fullest rank of one stage. ``first`` and ``last`` of its layers, ``last`` not among them."""

    first: int
    last: int
    weights: dict[str, int] = field(default_factory=dict)
    activations: int = 0
    copies: int = 0  # of the weights, those that other ranks of the stage hold as well
    media: dict[str, int] = field(default_factory=dict)  # what encoding takes, by what for
    passing: int = 0  # beside the weights, until the model is loaded

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def media_bytes(self) -> int:
        return sum(self.media.values())


def check_split(model: Model, split: Split) -> None:
    """Raises :class:`DoesNotDivide`."""
    if split.tensor > 1 and model.undivided:
        raise DoesNotDivide(model.undivided)
    if split.pipeline > (most := len(model.layers) - sum(model.follows)):
        raise DoesNotDivide(f"{len(model.layers)} layers make {most} stages at most, and not {split.pipeline}")
    sizes = {"attention heads": model.heads, "vocabulary": model.vocab}
    if split.expert:
        sizes["experts"] = model.experts
    elif model.experts:
        sizes["an expert's width"] = model.moe_inner
    for name, size in sizes.items():
        if name != "vocabulary" and size % split.tensor:
            raise DoesNotDivide(f"{name}: {size} do not divide by {split.tensor}")
    if model.wanted.quantization == "fp8":
        _check_float8(model, split)


def _check_float8(model: Model, split: Split) -> None:
    if split.pipeline > 1:
        raise DoesNotDivide("stages run on transformers' forward, whose linears do not compute in float8")
    for name, size in {"columns of heads": model.heads * model.head_dim, "inner columns": model.inner}.items():
        if size // split.tensor % 16:
            raise DoesNotDivide(f"{name}: {size // split.tensor} on a rank are no multiple of 16, which float8 takes")


def divide(model: Model, split: Split, *, batch_tokens: int, sampled: int, cpu: bool = False) -> list[Rank]:
    """The fullest rank of each stage. ``batch_tokens`` and ``sampled`` bound a step's rows; ``cpu``: where it computes.
    Raises :class:`DoesNotDivide`.
    """
    check_split(model, split)
    outer = model.outer
    first: WeightsByRole = {role: outer[role] for role in ("embedding", VISION) if role in outer}
    last: WeightsByRole = {role: part for role, part in outer.items() if role not in first}
    if model.tied and split.pipeline > 1 and "embedding" in outer:
        last["head"] = outer["embedding"]  # the last stage needs the table as well
    # As ranks cut when they load: by numbers, in however many bits they lie.
    costs = [sum(part.values for part in layer.values()) for layer in model.layers]
    ends = (sum(p.values for p in first.values()), sum(p.values for p in last.values()))
    ranks = []
    for begin, end in stages(costs, split.pipeline, ends, model.follows):
        rank = Rank(begin, end)
        held = [(parts, cache.heads) for parts, cache in zip(model.layers, model.caches, strict=True)][begin:end]
        held += [(first, 0)] if begin == 0 else []
        held += [(last, 0)] if end == len(model.layers) else []
        for parts, kv_heads in held:
            for role, stored in parts.items():
                part = _unpacked(role, stored, model, split)
                mine = _mine(role, part, model, split, kv_heads)
                rank.weights[role] = rank.weights.get(role, 0) + mine
                rank.passing += -(-part.passing // (1 if role in (*WHOLE, VISION) else split.tensor))
                rank.copies += mine + (-part.bytes // split.tensor) if _repeated(role, split) else 0
        drawn = sampled if end == len(model.layers) else 0
        if cpu:
            step = max(
                bound_on_cpus(model, split, batch_tokens, sampled), recurrence_bytes(model, batch_tokens, sampled)
            )
            rank.activations = cpu_logit_bytes(model, split, drawn) + step
        else:
            # Tokens are drawn once the layers' buffers are free again.
            rank.activations = max(
                logit_bytes(model, drawn),
                activation_bytes(model, split, batch_tokens, sampled),
                recurrence_bytes(model, batch_tokens, sampled),
            )
        ranks.append(rank)
    return ranks


def _repeated(role: str, split: Split) -> bool:
    """Whether several ranks of a stage hold the same of it."""
    return role in WHOLE or (role == SHARED and split.travel) or (role == EXPERTS and split.copies > 0)


def _unpacked(role: str, part: RoleWeights, model: Model, split: Split) -> RoleWeights:
    """A part as a GPU has it: in 16 bits, but for experts of which each rank has whole groups of codes."""
    stored = model.stored_as
    if stored is None or stored.group is None or (stored.dense and not model.experts and split.ranks == 1):
        return part
    cut = 1 if split.expert else split.tensor
    whole = stored.group and model.moe_inner % (stored.group * cut) == 0 and model.hidden % stored.group == 0
    if role == EXPERTS and whole:
        return part
    plain = max(part.bytes, part.values * 2)
    return RoleWeights(part.values, plain, part.keys * plain // max(part.bytes, 1), part.passing)


def unpacked_roles(model: Model, split: Split) -> list[str]:
    """What takes 16 bits once it is loaded, and fewer in the checkpoint."""
    parts = [(role, part) for layer in (*model.layers, model.outer) for role, part in layer.items()]
    return sorted({role for role, part in parts if _unpacked(role, part, model, split).bytes > part.bytes})


def _mine(role: str, part: RoleWeights, model: Model, split: Split, kv_heads: int) -> int:
    """Bytes of a part on the fullest rank of a stage; ``kv_heads`` of its layer."""
    tensor = split.tensor
    # What sees and hears is the first rank's alone, whether its pictures and sounds are served or not.
    if role in (*WHOLE, VISION) or (role == SHARED and split.travel):
        return part.bytes
    if role == EXPERTS and split.copies:
        return -(-part.bytes * (model.experts // tensor + split.copies) // model.experts)
    # Fewer heads than ranks lie on several of them.
    keys = part.keys if not kv_heads or kv_heads >= tensor else part.keys * tensor // kv_heads
    return -(-(part.bytes - part.keys + keys) // tensor)


def logit_bytes(model: Model, sampled: int) -> int:
    """Of ``sampled`` rows on the GPU that draws: as they come, in float32 and as log-probabilities; and what is
    computed where tokens are drawn (:data:`DRAWN_AT_ONCE` of them at a time).
    """
    numbers = sampled * model.vocab
    return numbers * (2 + 4 + 4) + 29 * min(numbers, DRAWN_AT_ONCE)


def cpu_logit_bytes(model: Model, split: Split, sampled: int) -> int:
    """Of ``sampled`` rows in float32, twice while tokens are drawn."""
    return 2 * 4 * sampled * -(-model.vocab // split.tensor)


def bound_on_cpus(model: Model, split: Split, tokens: int, texts: int) -> int:
    """What one step of ``tokens`` rows of so many ``texts`` takes at most on a CPU, where most of a layer is torch's
    operators one after the other: counted, over families and dtypes, by ``python -m benchmarks planned``.
    """
    item = model.item
    dense = 4 * item * model.inner // split.tensor
    # Of each choice: what enters and comes out, as it is and in the order of experts; gates and ups, cut off at limits.
    each = 4 * model.hidden + 7 * model.moe_inner // split.tensor
    mixture = item * model.chosen * each if model.experts else 0
    # Beside experts another MLP of the same layer, whose result waits for theirs (Gemma 4).
    mixture += item * model.hidden if any("mlp" in layer and EXPERTS in layer for layer in model.layers) else 0
    widest = max(_attention_bytes(model, split, tokens, texts), tokens * max(dense, mixture, _mixing_bytes(model)))
    return _passing_bytes(model, tokens) + widest


def _passing_bytes(model: Model, tokens: int) -> int:
    """Of ``tokens`` rows between layers: what entered the layer, and what it has come to; of all streams, which each
    half of a layer makes one (Xie et al. 2026)."""
    streams = model.streams + (model.streams > 1)
    return tokens * 2 * model.item * model.hidden * streams


def _mixing_bytes(model: Model) -> int:
    """Of a row whose streams become one, in float32, or several again."""
    return model.streams * model.hidden * max(8, 3 * model.item) if model.streams > 1 else 0


def _attention_bytes(model: Model, split: Split, tokens: int, texts: int) -> int:
    """What attention takes as torch's operators, and what chooses its keys before it."""
    item, heads = model.item, model.heads * model.head_dim // split.tensor
    kv = max((cache.rank_bytes(split.tensor) for cache in model.caches), default=0)
    if model.wanted.kv_cache_dtype == "fp8":  # until they are written
        kv *= item
    # Queries, keys and values as they are projected, normalised and rotated, with what that takes in between.
    found = tokens * (6 * item * heads + 3 * kv)
    queries = model.heads // split.tensor
    if any(cache.kind == "latent" for cache in model.caches):
        # Queries that meet latents, and sums of these, for each head.
        found += tokens * 2 * kv * queries
    if model.choosing is not None:
        found += choosing_bytes(
            model.choosing, rows=tokens, texts=texts, context=model.context, ranks=split.tensor, queries=queries,
            item=item,
        )  # fmt: skip
    return found


def activation_bytes(model: Model, split: Split, tokens: int, texts: int) -> int:
    """Of one step of ``tokens`` rows of so many ``texts`` in 16 bits, with buffers that layers use one after the other;
    where indexers choose keys, attention is torch's operators as on a CPU.
    """
    kv = max((cache.rank_bytes(split.tensor) for cache in model.caches), default=0)
    heads = model.heads * model.head_dim // split.tensor
    normed, inner = 2 * model.hidden, 2 * model.inner // split.tensor
    # What is projected to queries, keys and values, and the queries that are rotated.
    attention = normed + 2 * 2 * heads + kv
    # Gate and up of what is normalised, then their product.
    dense = max(normed + 2 * inner, 3 * inner)
    # Of each choice: what enters, gate and up, and what comes out.
    moe = normed + 2 * model.chosen * (2 * model.hidden + 2 * model.moe_inner // split.tensor) if model.experts else 0
    # Inputs of linears that compute in float8 lie there in codes as well.
    codes = max(model.hidden, heads, model.inner // split.tensor) if model.wanted.quantization == "fp8" else 0
    widest = tokens * (max(attention, dense, moe, _mixing_bytes(model)) + codes)
    if model.choosing is not None:
        widest = max(widest, _attention_bytes(model, split, tokens, texts))
    return _passing_bytes(model, tokens) // 2 + widest


def recurrence_bytes(model: Model, tokens: int, texts: int) -> int:
    """What a step takes within a layer with a state: of ``tokens`` rows of ``texts``, each of which is filled up to a
    whole chunk of 64; or the states of all of them, copied, changed, and what that is made of.
    """
    if not model.state_bytes:
        return 0
    fixed, each = model.recurrence
    rows = tokens + 64 * texts
    copied = 4 * texts * max(cache.state for cache in model.caches)
    return _passing_bytes(model, tokens) + max(int(fixed + each * rows), copied)
