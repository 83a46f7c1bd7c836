"""How much memory a computation takes at its peak, found without computing it: its tensors have sizes and no values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")


class Living(TorchDispatchMode):
    """Counts bytes of tensors from when an operator returns them until nothing holds them. ``known`` are not counted.
    What an operator takes for itself and gives back before it returns is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = self._living = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self.count(tensor, free=True)

    def count(self, tensor: Tensor, *, free: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0 if free else storage.nbytes()
        self._living += self._sizes[key]
        self.peak = max(self.peak, self._living)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._living -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.run(func, args, kwargs or {})
        for tensor in _tensors(found):
            self.count(tensor)
        return found

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator."""
        return func(*args, **kwargs)


class _Sizes(Living):
    """Floating point numbers have no values, integers and booleans have: which rows are taken, and how many, follows
    from these.
    """

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        without = any(tensor.is_meta for tensor in given)
        if without and func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            # To the host, whose memory is another, or where it lies already.
            return torch.ops.aten.alias.default(given[0])
        if without and any(not tensor.is_meta for tensor in given):
            if func is torch.ops.aten.index.Tensor:
                args = (args[0], [number for index in args[1] for number in _numbers(index)])
            args, kwargs = tree_map(_bare, (args, kwargs))
        elif not without and kwargs.get("device") == META and not _kind(func, given, kwargs).is_floating_point:
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)


def _kind(func: Any, given: list[Tensor], kwargs: dict[str, Any]) -> torch.dtype:
    """Of what an operator makes anew."""
    if kwargs.get("dtype") is not None:
        found: torch.dtype = kwargs["dtype"]
        return found
    if given:
        return given[0].dtype
    return torch.int64 if func._schema.name == "aten::arange" else torch.get_default_dtype()


def _numbers(index: Tensor | None) -> list[Tensor | None]:
    """In place of a mask, where it is true."""
    if index is None or index.is_meta or index.dtype != torch.bool:
        return [index]
    return list(index.nonzero(as_tuple=True))


class _Fused(TorchFunctionMode):
    """Attention as kernels compute it, on a device that has none: never all rows by all columns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        q, _, v = args[:3]
        # Beside what it gives, the logarithm of each row's sum.
        _sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)


def peak_bytes(compute: Callable[[], object], given: Iterable[Tensor], known: Iterable[Tensor]) -> int:
    """Of ``compute`` on tensors of the device "meta": ``given``, which count, and weights (``known``), which don't."""
    with torch.no_grad(), _Fused(), _Sizes(known) as living:
        for tensor in given:
            living.count(tensor)
        kept = compute()
        del kept
    return living.peak


def _bare(value: Any) -> Any:
    return value.to(META) if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
