"""Where a feature puts linears of its own into a model: an adapter's delta per request, a weight that is sharded.

A feature gives :func:`~serve_app.models.load.load_causal_lm` a :data:`Plug`, which is asked once for every
linear of the model, whichever forward pass the model gets. A model that nobody plugs into knows nothing of all this.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.packed import PackedLinear

if TYPE_CHECKING:
    from serve_app.engine.step import Batch
    from serve_app.kernels.decoder import LinearWeight


@dataclass(slots=True, frozen=True)
class Place:
    """One linear of a model: the modules whose outputs it computes side by side, by qualified name, and how many
    outputs each has; all take ``columns`` inputs. ``experts``: how many of them lie in one weight, whose name it
    is then.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    columns: int
    experts: int = 0


# (place, the linear there) -> what takes its place; the linear itself to leave it.
Plug = Callable[[Place, Linear], Linear]


def plugged(plug: Plug | None, weight: LinearWeight, linear: Linear) -> Linear:
    """``linear``, which computes with ``weight``, or what ``plug`` puts into its place."""
    if plug is None:
        return linear
    return plug(place_of(weight), linear)


def place_of(weight: LinearWeight) -> Place:
    """The place of a fused linear."""
    return Place(weight.names, tuple(len(part) for part in weight.parts), weight.parts[0].shape[1])


def chained(first: Plug | None, second: Plug | None) -> Plug | None:
    """A plug that lets ``second`` take what ``first`` has put into a place."""
    if first is None or second is None:
        return second if first is None else first
    before, after = first, second
    return lambda place, linear: after(place, before(place, linear))


@dataclass(slots=True)
class Current:
    """The batch of the pass that is under way; transformers hands linears nothing but their input."""

    batch: Batch | None = None

    def around(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """``forward`` with its batch held here while it runs."""

        def holding(batch: Batch) -> Tensor:
            self.batch = batch
            try:
                return forward(batch)
            finally:
                self.batch = None

        return holding

    @contextmanager
    def within(self, batch: Batch, index: Tensor | slice) -> Iterator[None]:
        """Linears get these rows of ``batch`` alone."""
        before = self.batch
        adapters = None if batch.adapters is None else batch.adapters[index]
        self.batch = replace(batch, input_ids=batch.input_ids[index], adapters=adapters, tiles=None, sampled_tiles=None)
        try:
            yield
        finally:
            self.batch = before


class ModuleLinear(Linear):
    """A module of transformers seen as a linear."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.dtype = module.dtype if isinstance(module, PackedLinear) else module.weight.dtype

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        return self._module(x)

    def idle(self, batch: Any) -> bool:
        return True


class BatchLinear(nn.Module):
    """Stands where an ``nn.Linear`` stood and gives ``linear`` the batch."""

    def __init__(self, original: Any, linear: Linear, current: Current) -> None:
        super().__init__()
        self.original, self.linear, self.current = original, linear, current

    @property
    def weight(self) -> Tensor:
        """For modelling code that asks for a dtype or a device."""
        return self.original.weight

    @property
    def bias(self) -> Tensor | None:
        return self.original.bias

    def forward(self, x: Tensor) -> Tensor:
        batch = self.current.batch
        if batch is None:
            raise RuntimeError("a plugged linear runs through the model's forward function only, which sets the batch")
        if self.linear.idle(batch):
            return self.original(x)
        flat = x.reshape(-1, x.shape[-1])
        # Some heads get all rows, others those that are sampled; BERT's is several linears.
        rows = None if len(flat) == len(batch.input_ids) else batch.sample_rows
        if rows is not None and len(flat) != len(rows):
            raise ValueError(
                f"a linear gets {len(flat)} rows of a batch of {len(batch.input_ids)} tokens, as in an expert; leave it"
                " as it is"
            )
        out = self.linear(flat, batch, rows)
        return out.view(*x.shape[:-1], out.shape[-1])  # of a step that samples nothing the head gets no rows


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what an ``nn.Linear`` does: GPT-2's ``Conv1D`` holds its weight transposed, Falcon's
    ``FalconLinear`` adds its bias in a second step.
    """
    return type(module) in (nn.Linear, PackedLinear) or type(module).__name__ in ("Conv1D", "FalconLinear")


def _sizes(module: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    if type(module).__name__ == "Conv1D":
        return int(module.weight.shape[1]), int(module.weight.shape[0])
    return int(module.out_features), int(module.in_features)


@torch.inference_mode()
def linears_by_row(
    model: nn.Module, current: Current, run: Callable[[], Any], also: Container[str] = frozenset()
) -> set[str]:
    """Names of the linears, and of the modules ``also`` looked at, that get one row for each token, or for each sampled
    one, whenever ``run()`` calls them: linears in experts and in other models' towers are not among them.
    """
    right: dict[str, bool] = {}

    def watching(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            batch = current.batch
            assert batch is not None
            rows = inputs[0].numel() // inputs[0].shape[-1] if inputs else -1
            right[name] = right.get(name, True) and rows in (len(batch.input_ids), len(batch.sample_rows))

        return seen

    hooks = [
        module.register_forward_pre_hook(watching(name))
        for name, module in model.named_modules()
        if name and (is_linear(module) or name in also)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name for name, holds in right.items() if holds}


def plug_modules(model: nn.Module, plug: Plug, current: Current, only: set[str] | None = None) -> int:
    """Puts what ``plug`` gives into the places of the model's linears, or of ``only`` some; returns how many it
    replaced.
    """
    replaced = 0
    for name, module in list(model.named_modules()):
        if not is_linear(module) or not name or (only is not None and name not in only):
            continue
        own, (outputs, inputs) = ModuleLinear(module), _sizes(module)
        linear = plug(Place((name,), (outputs,), inputs), own)
        if linear is not own:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, BatchLinear(module, linear, current))
            replaced += 1
    return replaced
