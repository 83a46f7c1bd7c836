"""What of a model each rank has, by the model's own plan.

transformers' configurations say of each module how ranks divide it (``base_model_tp_plan``). Read off a model without
memory, that becomes a cut for each parameter, and a list of the modules where ranks come together again.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from serve_app.kernels.linear.quantize import GROUP
from serve_app.models.divided.plans import MORE, PLANS, SUMS
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.mixtures.mixture import own_weights
from serve_app.models.mixtures.scaled import scaled_blocks
from serve_app.models.stateful import keeps_state
from serve_app.parallel.dispatch import Wire, least_rows
from serve_app.parallel.place import Place
from serve_app.parallel.stages import following, stages

_SHARED_EXPERTS = re.compile(r"\.shared_experts?(\.|$)")
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_PACKED = ("packed_colwise", "packed_rowwise")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "embedding_rowwise")


@dataclass(slots=True, frozen=True)
class Cut:
    """A parameter's dimension that is divided, which consists of ``pieces`` (gates, then ups) that are divided each."""

    dim: int
    pieces: int = 1


@dataclass(slots=True)
class Division:
    """``cuts`` by parameter; linears and experts by what ranks do behind them: ``summed``, ``sliced`` and ``joined``
    (:mod:`.modules`), ``grouped`` where inputs lie in groups of which each rank has some, and ``experts`` whose results
    are added, or those of the whole ``blocks`` they are in. ``few``: projections to fewer K/V heads than there are
    ranks, with the number of their heads: each rank keeps one.
    ``heads``: K/V heads of each layer, where they are known, and None where each rank has its share of them. ``once``:
    biases that one rank adds.
    """

    place: Place
    cuts: dict[str, Cut] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    sliced: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    grouped: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    few: dict[str, int] = field(default_factory=dict)
    heads: dict[int, int | None] = field(default_factory=dict)
    once: set[str] = field(default_factory=set)
    # Rows of a step from which on they travel to their experts; 0: they never do.
    least: int = 0
    # Of the whole model: rows of the head and of the embedding, and layers.
    vocab: int = 0
    embedded: int = 0
    head: str = ""
    layers: int = 0
    names: set[str] = field(default_factory=set)
    # Of the whole model: sizes of the weights that adapters may be for beside linears, by module.
    owned: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    # Layers [first, last) of each stage.
    stages: list[tuple[int, int]] = field(default_factory=list)

    @property
    def widths(self) -> list[int]:
        """Columns of the logits that each part of the last stage has."""
        tensor = self.place.tensor
        if self.vocab < tensor * tensor:  # too few for each to have some
            return [self.vocab]
        return [len(Place(tensor, 1, part).share(self.vocab)) for part in range(tensor)]

    @property
    def held(self) -> range:
        """This stage's layers."""
        return range(*self.stages[self.place.stage])

    def all_heads(self, layer: int, heads: int) -> int:
        """K/V heads of a layer of which this rank's attention hands over ``heads``."""
        found = self.heads.get(layer, heads)
        return heads * self.place.tensor if found is None else found


def bare(model_class: Any, config: Any) -> nn.Module:
    """The model without memory."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        named = hasattr(model_class, "config_class")  # and not one of transformers' Auto classes
        module = model_class._from_config(config) if named else model_class.from_config(config)
    module.tie_weights()
    return module


def dispatch_from(module: Any, place: Place, item: int, wire: Wire) -> int:
    """:attr:`Division.least` for values of ``item`` bytes. ``module`` is :func:`bare`."""
    if place.dispatch == "never" or not place.whole_experts:
        return 0
    if place.dispatch == "always":
        return 1
    config = module.config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((found for name in names if (found := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    # Shared experts are divided, and need all rows on each rank, as do layers that keep states.
    if any(keeps_state(child) for child in module.modules()) or _per_layer_inputs(module):
        return 0
    if not experts or not chosen or any(_SHARED_EXPERTS.search(name) for name, _ in module.named_modules()):
        return 0
    return least_rows(experts, chosen, place.tensor, config.hidden_size * item, wire)


def divide(module: Any, place: Place, least: int = 0) -> Division:
    """``module`` is :func:`bare`; ``least``: :attr:`Division.least`. Raises :class:`UnsupportedModel`, which names what
    does not divide.
    """
    name = type(module).__name__
    head = module.get_output_embeddings()
    layers = layers_of(module)
    found = Division(place, vocab=head.weight.shape[0], layers=len(layers), least=least)
    found.head = next((each for each, child in module.named_modules() if child is head), "")
    found.embedded = module.get_input_embeddings().weight.shape[0]
    found.names = {each for each, _ in module.named_parameters(remove_duplicate=False)}
    found.owned = own_weights(module)
    found.stages = _stages(module, layers, place.pipeline)
    _require_embeddings(module, found, name)
    if place.tensor == 1:
        return found
    plan = PLANS.get(module.config.model_type) or dict(module.tp_plan or {})
    if not any(".layers." in rule or ".h." in rule for rule in plan):
        raise UnsupportedModel(
            f"transformers has no plan by which ranks divide the layers of {name}; leave tensor_parallel out, or use "
            "pipeline_parallel"
        )
    modules = dict(module.named_modules())
    [below] = [each for each, child in modules.items() if child is layers]
    more = MORE.get(module.config.get_text_config().model_type, {})
    grouped = [rule for rule, style in more.items() if style == "grouped"]
    named = (each for rule in grouped for each in _named(f"{below}.*.{rule}", list(modules)))
    if any(modules[each].n_groups % place.tensor for each in named):
        # What has its inputs in groups that do not divide stays whole, and with it the attention before it.
        more = {rule: style for rule, style in more.items() if "self_attn" not in rule}
    plan |= {f"{below}.*.{rule}": style for rule, style in more.items()}
    outer = {each for each, child in modules.items() if child is head or child is module.get_input_embeddings()}
    keeping = {each for each, child in modules.items() if keeps_state(child)}
    if least and keeping:
        raise UnsupportedModel(f"{name} has layers that keep states; expert_dispatch: always does not go with them yet")
    seeing = tuple(f"{each}." for each in looking(module))
    rules = [
        (target, style)
        for rule, style in plan.items()
        for target in _named(rule, [*modules, *found.names])
        if not f"{target}.".startswith(seeing)
        # Where rows travel, those of a rank go through shared experts there.
        and not (least and _SHARED_EXPERTS.search(target))
        # A text's state lies whole on each rank, so that what makes it comes together before it does.
        and not (style != "colwise_gather_output" and target.rpartition(".")[0] in keeping)
    ]
    if place.whole_experts:
        _whole_experts(found, modules, [target for target, style in rules if style == "moe_tp_experts"], name)
    for target, style in rules:
        if target not in outer and target not in found.cuts and target not in found.experts:
            _take(found, modules, target, style, name)
    for child in (head, module.get_input_embeddings()) if len(found.widths) > 1 else ():
        [own] = [each for each, other in modules.items() if other is child]
        found.cuts |= {f"{own}.{key}": Cut(0) for key, _ in child.named_parameters(recurse=False)}
    _few_heads(found, modules, name)
    if module.config.get_text_config().model_type in SUMS:
        _sum_once(found)
    return found


def _require_embeddings(module: Any, found: Division, name: str) -> None:
    """Layers with inputs of their own (Gemma 4) get them of the embeddings of all rows."""
    if not _per_layer_inputs(module):
        return
    if found.least:
        raise UnsupportedModel(
            f"{name}: layers have inputs of their own; expert_dispatch: always does not go with them"
        )
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    # The last stage has the whole table where its head is the same.
    if found.place.pipeline > 2 or (found.place.pipeline == 2 and not (tied and len(found.widths) == 1)):
        raise UnsupportedModel(
            f"{name}: layers have inputs of their own, made of the embeddings, which other stages than the first do "
            "not have; use tensor_parallel alone"
        )


def _per_layer_inputs(module: Any) -> bool:
    return bool(getattr(module.config.get_text_config(), "hidden_size_per_layer_input", 0))


def _sum_once(found: Division) -> None:
    """Ranks add up what routed and shared experts give together, and not each."""
    for block in {target.rpartition(".")[0] for target in found.experts}:
        shared = {name for name in found.summed if name.startswith(f"{block}.")}
        if shared:
            found.blocks.add(block)
            found.summed -= shared


def keep_groups(module: Any, division: Division) -> None:
    """Raises :class:`UnsupportedModel` where ranks would get parts of the groups of columns that are rounded together
    in int8 and int4. ``module`` is :func:`bare`.
    """
    tensor = division.place.tensor
    for target, cut in division.cuts.items():
        owner, _, own = target.rpartition(".")
        holder = module.get_submodule(owner)
        weight = getattr(holder, own)
        if weight.ndim < 2 or cut.dim != (1 if getattr(holder, "is_transposed", False) else weight.ndim - 1):
            continue
        size = weight.shape[cut.dim]
        if size % GROUP == 0 and size // tensor % GROUP:
            raise UnsupportedModel(
                f"{type(module).__name__}: {target} has {size} columns, {size // tensor} for each of {tensor} ranks, "
                f"and {GROUP} of them are rounded together; use fewer ranks, pipeline_parallel, expert_parallel where "
                "it has experts, or quantization: none"
            )


def layers_of(module: Any) -> nn.ModuleList:
    """The decoder's layers. Raises :class:`UnsupportedModel` where they can't be told."""
    config = module.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    found = [
        child
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) == count and _attends(child[0])
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"{type(module).__name__} has no one list of {count} layers; it can't be divided")
    return found[0]


def _stages(module: Any, layers: nn.ModuleList, count: int) -> list[tuple[int, int]]:
    """Such that the fullest rank has least to hold."""

    def size(*parts: nn.Module | None) -> int:
        return sum(weight.numel() for part in parts if part is not None for weight in part.parameters())

    costs = [size(layer) for layer in layers]
    table = module.get_input_embeddings()
    first = size(table, *looking(module).values())
    tied = module.get_output_embeddings().weight is table.weight
    last = size(module) - sum(costs) - first + (size(table) if tied else 0)
    try:
        return stages(costs, count, (first, last), following(module.config.get_text_config()))
    except ValueError as error:
        raise UnsupportedModel(f"{type(module).__name__}: {error}") from error


def looking(module: Any) -> dict[str, nn.Module]:
    """What sees or hears beside a language model, by name; it is whole on rank 0."""
    for prefix, base in (("", module), ("model.", getattr(module, "model", None))):
        children = dict(base.named_children()) if base is not None else {}
        if "language_model" in children:
            return {
                f"{prefix}{name}": child
                for name, child in children.items()
                if name not in ("language_model", "lm_head")
            }
    return {}


def _attends(layer: nn.Module) -> bool:
    return any(hasattr(child, "layer_idx") for child in layer.modules())


def _named(rule: str, names: list[str]) -> list[str]:
    pattern = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
    return [name for name in dict.fromkeys(names) if pattern.fullmatch(name)]


def _take(found: Division, modules: dict[str, nn.Module], target: str, style: str, name: str) -> None:
    """Enters one of the plan's rules, for the module or parameter ``target``."""
    if style in _WHOLE:
        return
    if target in found.names:
        _cut(found, modules, target, style, name)
        return
    module: Any = modules[target]
    own = dict(module.named_parameters(recurse=False))
    if style == "moe_tp_experts":
        found.experts.add(target)
        found.once |= {f"{target}.{key}" for key in own if key in ("down_proj_bias",)}
        return
    if style == "grouped":
        _cut(found, modules, f"{target}.weight", "colwise", name)
        found.grouped.add(target)
        return
    if type(module) is not nn.Linear or style not in _COLUMNS + _ROWS:
        raise UnsupportedModel(
            f"{name}: {target} is a {type(module).__name__} that is to be divided {style}; that is not supported yet"
        )
    for key in own:
        if style in _COLUMNS or key == "weight":
            _cut(found, modules, f"{target}.{key}", style, name)
        else:
            found.once.add(f"{target}.{key}")
    joins = {"rowwise_split_input": found.sliced, "colwise": set(), **dict.fromkeys(_ROWS[::2], found.summed)}
    joins.get(style, found.joined).add(target)


def _cut(found: Division, modules: dict[str, nn.Module], target: str, style: str, name: str) -> None:
    owner, _, own = target.rpartition(".")
    weight: Any = getattr(modules[owner], own)
    if style in _COLUMNS or style == "packed_colwise":
        dim = max(weight.ndim - 2, 0)
    elif style in _ROWS or style == "packed_rowwise":
        dim = weight.ndim - 1
    else:
        raise UnsupportedModel(f"{name}: {target} is to be divided {style}; that is not supported yet")
    pieces = 2 if style in _PACKED else 1
    found.cuts[target] = Cut(dim, pieces)
    size = weight.shape[dim]
    # Fewer heads than ranks may be: _few_heads.
    projects = style == "colwise" and owner.rpartition(".")[2] in ("k_proj", "v_proj")
    if not projects and size % (pieces * found.place.tensor):
        raise UnsupportedModel(
            f"{name}: {target} has {size // pieces} columns, which {found.place.tensor} ranks can't divide"
        )


def _whole_experts(found: Division, modules: dict[str, nn.Module], experts: list[str], name: str) -> None:
    tensor = found.place.tensor
    if not experts:
        raise UnsupportedModel(
            f"transformers names no experts of {name} that ranks could hold whole; leave expert_parallel out"
        )
    routed = {f"{block}.experts" for block in scaled_blocks(modules[""])}
    for target in experts:
        if target not in routed and len(inspect.signature(type(modules[target]).forward).parameters) < 4:
            raise UnsupportedModel(
                f"{name}: {target} is not told which row has chosen which expert, so that ranks can't hold some whole; "
                "leave expert_parallel out"
            )
        found.experts.add(target)
        for key, weight in modules[target].named_parameters(recurse=False):
            if weight.shape[0] % tensor:
                raise UnsupportedModel(
                    f"{name}: {target} has {weight.shape[0]} experts, which {tensor} ranks can't divide"
                )
            found.cuts[f"{target}.{key}"] = Cut(0)


def _few_heads(found: Division, modules: dict[str, nn.Module], name: str) -> None:
    """Sees to it that heads stay whole, and that each rank has those which its queries attend to."""
    tensor = found.place.tensor
    for owner, module in modules.items():
        attn: Any = module
        layer = getattr(attn, "layer_idx", None)
        if layer is None:
            continue
        cut = {own for own in ("q_proj", "k_proj", "v_proj") if f"{owner}.{own}.weight" in found.cuts}
        fused = {each for each in found.cuts if each.startswith(f"{owner}.")} - {f"{owner}.{own}.weight" for own in cut}
        joined = {each for each in found.joined if each.startswith(f"{owner}.")}
        if joined or not (cut or fused):
            continue  # every rank has all heads
        width = getattr(attn, "head_dim", None)
        if "k_proj" not in cut or not width:
            found.heads[layer] = None
            if f"{owner}.kv_b_proj.weight" in fused and attn.num_heads % tensor:
                raise UnsupportedModel(f"{name}: {owner} has {attn.num_heads} heads, which {tensor} ranks can't divide")
            continue
        queries, keys = (getattr(attn, own).out_features for own in ("q_proj", "k_proj"))
        heads, rest = divmod(keys, width)
        if rest or "q_proj" not in cut or queries % (width * tensor) or (heads % tensor and tensor % heads):
            raise UnsupportedModel(
                f"{name}: {owner} has {queries // width} query heads and {keys / width:g} K/V heads, which {tensor} "
                "ranks can't divide"
            )
        found.heads[layer] = heads
        if heads % tensor:
            for own in cut - {"q_proj"}:
                found.few[f"{owner}.{own}"] = heads
                for key in ("weight", "bias"):
                    found.cuts.pop(f"{owner}.{own}.{key}", None)
