"""Reads one rank's part of a model from its folder.

transformers' loader converts checkpoints and reads of each tensor what a parameter's place holder asks for. Here a
model's class makes such place holders, and leaves layers of other stages out; once it is loaded, what is left is
transformers' modules with smaller weights, and :mod:`.modules` where ranks come together.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.runner import Forward
from serve_app.kernels.coded import Form
from serve_app.models.crossing import KNOWN as CROSSING
from serve_app.models.divided.division import Division, bare, dispatch_from, divide, keep_groups, layers_of, looking
from serve_app.models.divided.modules import (
    JoinedLinear,
    NoEmbedding,
    PartOfGroups,
    SlicedLinear,
    SummedLinear,
    Through,
    VocabularyEmbedding,
    hold_experts,
    sums,
)
from serve_app.models.divided.placing import Counts, Slots, balance, place_module, placements
from serve_app.models.divided.sharing import Shares, share_rows, with_states
from serve_app.models.linears import Plug
from serve_app.models.loading.adapt import reading
from serve_app.models.loading.folder import UnsupportedModel, packing_of, read_config
from serve_app.models.loading.observe import SeenLayer
from serve_app.models.loading.packed import form_of, format_of, open_files, plain_config
from serve_app.models.loading.slices import Tally, open_slices
from serve_app.models.mixtures.coded import coded_experts, columns_of, hold_rows
from serve_app.models.mixtures.scaled import route_rows, scaled_blocks
from serve_app.models.quantization import BITS
from serve_app.parallel.cache import first_head
from serve_app.parallel.dispatch import LOOPBACK, NVLINK
from serve_app.parallel.experts import read_loads
from serve_app.parallel.group import Group
from serve_app.parallel.place import Place
from serve_app.parallel.states import States
from serve_app.parallel.steps import SharedForward
from serve_app.wire.ranks import RankLayer


@dataclass(slots=True)
class PartOfModel:
    """``module`` computes this rank's part, together with the others. ``info``: what transformers tells of loading it.
    ``read_bytes`` were read of files, and ``held_bytes`` are those of its weights."""

    module: Any
    division: Division
    info: dict[str, Any]
    read_bytes: int
    held_bytes: int
    shares: Shares
    balanced: str  # how evenly experts are placed by what they had to do; "": they lie in order

    def sharing(self, group: Group) -> Callable[[Forward], Forward]:
        """Makes of a pass over this part one over the whole model, which all ranks run together."""
        config = self.module.config.get_text_config()
        states = States(group, self.division.stages, self.shares, config.hidden_size, self.module.dtype)
        return lambda forward: SharedForward(forward, group, self.division.widths, states)

    @staticmethod
    def local_of(forward: Forward) -> Forward:
        """The pass over this rank's part that :meth:`sharing` has made a whole one of."""
        assert isinstance(forward, SharedForward)
        return forward.local

    def summing(self, group: Group) -> Plug:
        """Adds up the parts of the linears that the fused decoder reads off the module."""
        return sums(group, {f"{name}.linear" for name in self.division.summed})

    def cache(self, layers: list[SeenLayer]) -> tuple[RankLayer, ...]:
        """What this rank keeps of each of its layers."""
        found, place = [], self.division.place
        for seen in layers:
            index = seen.number
            heads, width = seen.kv_heads, max(seen.key_dim, seen.value_dim)
            # Every rank has the latent, which all heads make their keys and values of.
            every = heads if seen.shared else self.division.all_heads(index, heads)
            found.append(RankLayer(index, heads, first_head(place, heads, every), every, width, seen.shared))
        return tuple(found)


def refuse_divided(*, family: str, plug: Plug | None) -> None:
    """Raises :class:`UnsupportedModel` for what a model of ``family`` on several ranks can't do yet."""
    wanted = {
        "plugged linears": plug is not None,
        f"{family}'s layers that attend to pictures": family in CROSSING,
    }
    for name, asked in wanted.items():
        if asked:
            raise UnsupportedModel(f"{name} and several ranks do not go together yet; leave one of them out")


def load_part(
    model_class: Any,
    path: Path,
    *,
    dtype: torch.dtype,
    group: Group,
    quantization: str = "none",
    counts: Path | None = None,
    least: int | None = None,
    codes: bool = False,
) -> PartOfModel:
    """Every rank of the group calls it. ``quantization``: what the weights will be rounded to; ``counts``: the folder
    with what experts had to do; ``least``, for a trial: rows of a step from which on they travel to their experts,
    instead of what the rule says; ``codes``: experts in few bits stay so where they compute on these. Raises
    :class:`UnsupportedModel` where the model has no such division.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    described = packing_of(read_config(path))
    if described:
        format_of(described, path)
    config = plain_config(model_class, path)
    whole = bare(model_class, config)
    if least is None:
        wire = LOOPBACK if group.device.type == "cpu" else NVLINK
        least = dispatch_from(whole, group.place, dtype.itemsize, wire)
    division = divide(whole, group.place, least)
    if quantization in BITS:
        keep_groups(whole, division)

    files = sorted(map(str, path.glob("*.safetensors")))
    form = form_of(described, files, group.device) if codes and described else None
    held = coded_experts(whole, form) if form is not None else {}
    if form is None or not all(_whole_groups(division, form, name, experts) for name, experts in held.items()):
        form, held = None, {}

    def holds(model: Any, *_: Any) -> Any:
        _leave_media(model, group.place)
        _leave_other_stages(model, division, dtype)
        for name in held:
            if form is not None and (experts := _found(model, name)) is not None:
                hold_rows(experts, form)
        _hold_places(model, division, group)
        return model

    tally = Tally()

    def reads(model: Any, state: Any, files: Any, *more: Any, **named: Any) -> Any:
        with ExitStack() as opened:
            if described:
                tensors = open_files(files, described, dtype, opened, form if held else None, tally)
            else:
                tensors = open_slices(files, opened, tally)
            return model_class._load_pretrained_model(model, tensors, files, *more, **named)

    own = {"maybe_distribute_model": staticmethod(holds), "_load_pretrained_model": staticmethod(reads)}
    part: Any = type(model_class.__name__, (model_class,), own)
    part.__module__ = model_class.__module__
    module, info = part.from_pretrained(
        path,
        **reading(model_class, dtype),
        distributed_config=DistributedConfig(),
        **({"config": config} if described else {}),
    )
    module.__class__ = model_class
    module.config.__dict__.pop("distributed_config", None)
    info["unexpected_keys"] = set(info.get("unexpected_keys") or ()) - division.names
    kept = _take_parts(module, division)
    module.requires_grad_(False)
    module.held_layers = division.held
    chosen = Counts(None if group.place.part else counts, f"layers-{division.held.start}-{division.held.stop}")
    shares = Shares(group, division.least, chosen)
    slots, balanced = _place_experts(module, division, group, counts)
    _join(module, division, shares, slots)
    return PartOfModel(module, division, info, tally.bytes, kept, shares, balanced)


def _place_experts(model: Any, division: Division, group: Group, counts: Path | None) -> tuple[dict[str, Slots], str]:
    """Puts experts where they are wanted; where, and what comes of it."""
    place = group.place
    if not place.copies or not place.whole_experts:
        return {}, ""
    modules = {name: found for name in sorted(division.experts) if (found := _found(model, name)) is not None}
    sizes = {name: len(next(found.parameters(recurse=False))) * place.tensor for name, found in modules.items()}
    if counts is None:  # a trial
        loads = {name: [3.0 * expert % 5 + 1 for expert in range(size)] for name, size in sizes.items()}
    else:
        loads = read_loads(counts)
    placed = placements(sizes, loads, group, place.copies)
    slots = {name: place_module(modules[name], found, group) for name, found in placed.items()}
    return slots, balance(placed, loads, place.tensor) if not place.part else ""


def _whole_groups(division: Division, form: Form, name: str, experts: Any) -> bool:
    """Whether each rank has whole groups of the columns that share a scale."""
    columns = columns_of(experts)
    cut = {own for own, _ in experts.named_parameters(recurse=False) if (each := division.cuts.get(f"{name}.{own}"))
           and each.dim == columns}  # fmt: skip
    return all(getattr(experts, own).shape[columns] % (form.group * division.place.tensor) == 0 for own in cut)


def _leave_media(model: Any, place: Place) -> None:
    """Rank 0 alone sees and hears; what stands beside the language model is nothing to the others."""
    for name, child in looking(model).items() if place.rank else ():
        if next(child.parameters(), None) is not None:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, Through())


def _leave_other_stages(model: Any, division: Division, dtype: torch.dtype) -> None:
    place = division.place
    if place.pipeline == 1:
        return
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        if index not in division.held:
            absent = Through(pair=returns_pair(layer))
            # What the model's own forward asks of a layer, its kind of attention for one.
            absent.__dict__.update({k: v for k, v in vars(layer).items() if not k.startswith("_") and k != "training"})
            layers[index] = absent
    tied = bool(model.all_tied_weights_keys)
    if not place.first and not (tied and place.last):
        width = model.get_input_embeddings().weight.shape[1]
        model.set_input_embeddings(NoEmbedding(width, dtype))
    if not place.last:
        head = Through()
        head.weight = torch.empty(0, dtype=dtype)  # Mamba asks for its dtype
        model.set_output_embeddings(head)
        model.all_tied_weights_keys = {}


def returns_pair(layer: nn.Module) -> bool:
    """Whether a decoder's layer returns hidden states and something beside them; annotations do not always say so."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(layer).forward)))
    found = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Return)]
    return any(isinstance(each.value, ast.Tuple) and len(each.value.elts) == 2 for each in found)


def _hold_places(model: Any, division: Division, group: Group) -> None:
    """Puts place holders where parameters are to be read in part."""
    if division.place.tensor == 1:
        return
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    for name, cut in division.cuts.items():
        owner, _, own = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:  # of another stage
            continue
        weight = module._parameters.get(own)
        if weight is None:
            continue
        placement = Shard(cut.dim) if cut.pieces == 1 else _StridedShard(dim=cut.dim, split_factor=cut.pieces)
        held = distribute_tensor(weight, group.mesh, [placement], src_data_rank=None)
        module._parameters[own] = nn.Parameter(held, requires_grad=False)


def _take_parts(model: Any, division: Division) -> int:
    """Leaves plain tensors of this rank's parts; returns their bytes."""
    place = division.place
    taken: dict[int, tuple[Any, nn.Parameter]] = {}  # a head that is tied to the embedding stays so
    for module in model.modules():
        for key, weight in list(module._parameters.items()):
            if weight is not None and hasattr(weight, "to_local"):
                if id(weight) not in taken:
                    part = nn.Parameter(weight.to_local().contiguous(), requires_grad=False)
                    taken[id(weight)] = weight, part
                module._parameters[key] = taken[id(weight)][1]
    for name, heads in division.few.items():
        linear = _found(model, name)
        if linear is not None:
            width = linear.weight.shape[0] // heads
            at = place.part * heads // place.tensor * width
            for key in ("weight", "bias"):
                whole = linear._parameters[key]
                if whole is not None:
                    linear._parameters[key] = nn.Parameter(whole[at : at + width].clone(), requires_grad=False)
    for name in division.once if place.part else ():
        owner, _, own = name.rpartition(".")
        module = _found(model, owner)
        if module is not None:
            with torch.no_grad():
                getattr(module, own).zero_()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())


def _found(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:  # of another stage
        return None


def _join(model: Any, division: Division, shares: Shares, slots: dict[str, Slots]) -> None:
    """Puts what ranks do together into the places where they do it."""
    group = shares.group
    layers, place = layers_of_part(model, division), group.place
    for name, block in scaled_blocks(model).items():
        if f"{name}.experts" in division.experts:
            route_rows(block)
    if division.least:
        ends = {name.rpartition(".")[0] for name in division.summed}
        dense, experts = (
            {module for name in names if (module := _found(model, name)) is not None}
            for names in (ends, division.experts)
        )
        share_rows(layers, shares, dense, experts)
    kinds: dict[Any, set[str]] = {SummedLinear: division.summed, SlicedLinear: division.sliced}
    kinds |= {JoinedLinear: division.joined, PartOfGroups: division.grouped}
    for name, kind in ((name, kind) for kind, names in kinds.items() for name in names):
        if (linear := _found(model, name)) is not None:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, kind(linear, shares))
    for name in division.experts:
        if (experts := _found(model, name)) is not None:
            summed = name.rpartition(".")[0] not in division.blocks
            if place.whole_experts:
                counted = None
                if shares.chosen.folder is not None and place.copies:
                    size = len(slots[name].copies) if name in slots else len(next(experts.parameters())) * place.tensor
                    counted = shares.chosen.start(name, size, group.device)
                hold_experts(experts, shares, summed=summed, slots=slots.get(name), counted=counted)
            elif summed:
                experts.register_forward_hook(lambda module, inputs, out: group.sum(out))
    for name in division.blocks:
        if (block := _found(model, name)) is not None:
            block.register_forward_hook(_sums(group))
    _join_vocabulary(model, division, group)
    layers[0].register_forward_pre_hook(_takes(shares), with_kwargs=True)
    layers[-1].register_forward_hook(_sends(shares))


def _sums(group: Group) -> Any:
    """Of a block that may return what its router gave beside its result."""
    return lambda module, inputs, out: (group.sum(out[0]), *out[1:]) if isinstance(out, tuple) else group.sum(out)


def _join_vocabulary(model: Any, division: Division, group: Group) -> None:
    table: Any = model.get_input_embeddings()
    if isinstance(table, NoEmbedding) or len(division.widths) == 1:
        return
    rows, width = table.weight.shape
    if not group.place.first:  # here for the head alone, which is tied to it
        model.set_input_embeddings(NoEmbedding(width, table.weight.dtype))
        return
    table.num_embeddings, table.padding_idx = rows, None
    every = division.embedded
    model.set_input_embeddings(VocabularyEmbedding(table, group.place.share(every).start, group))


def layers_of_part(model: Any, division: Division) -> list[nn.Module]:
    """This stage's layers."""
    [found] = [
        child
        for child in model.modules()
        if isinstance(child, nn.ModuleList)
        and len(child) == division.layers
        and any(hasattr(each, "layer_idx") for each in child[division.held.start].modules())
    ]
    return [found[index] for index in division.held]


def _takes(shares: Shares) -> Any:
    group = shares.group

    def taken(states: Tensor) -> Tensor:
        states = shares.begin(states)
        return states if group.place.first else group.take_on(states)

    return lambda module, inputs, options: with_states(taken, inputs, options)


def _sends(shares: Shares) -> Any:
    group = shares.group

    def hook(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        states = out[0] if isinstance(out, tuple) else out
        if group.place.last:
            whole = shares.join(states)
        else:
            group.send_on(states)
            # Of the right shape for what follows, which nobody reads: [1, rows, hidden], or streams of these.
            whole = states.new_zeros(states.shape[0], shares.rows or states.shape[1], *states.shape[2:])
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    return hook
