"""Torch without its compiler, which nothing here uses.

Torch and transformers mark functions for the compiler, some when they are imported and some when they are first called,
and each mark imports it: 1.4 s of a core and 80 MB for each process that computes. So its package has a stand-in, which
knows the marks and lets functions be as they are. Whoever wants anything else of it, or a module within it, gets the
package itself: it is imported then.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
# Of this module within it, transformers' masks name a class when they are imported.
TRACED = f"{COMPILER}._trace_wrapped_higher_order_op"


class TransformGetItemToIndex:
    """That class: a context in which ``vmap`` indexes tensors by tensors. Torch's own as soon as one is made."""

    def __new__(cls) -> Any:
        _end()
        return importlib.import_module(TRACED).TransformGetItemToIndex()


def _mark(function: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
    return (lambda marked: marked) if function is None else function


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # Who looks through all modules (inspect does) asks for these, and wants nothing of the compiler.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _end()
        return getattr(importlib.import_module(self.__name__), name)


class _Within:
    """Finds modules of the package while the stand-in is there, by importing the package itself first."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}."):
            return None
        _end()
        importlib.import_module(COMPILER)
        # What was imported with it is there already; the rest is found in the package's folder.
        return ModuleSpec(name, _Loaded()) if name in sys.modules else importlib.util.find_spec(name)


class _Loaded(Loader):
    """What the package's own import has loaded."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


def _end() -> None:
    if _Within in sys.meta_path:
        sys.meta_path.remove(_Within)
    for name in (COMPILER, TRACED):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if isinstance(torch := sys.modules.get("torch"), ModuleType) and isinstance(vars(torch).get("_dynamo"), _StandIn):
        del vars(torch)["_dynamo"]


def begin() -> None:
    """For this process, before anything imports torch. Does nothing where the compiler is there already."""
    if COMPILER in sys.modules:
        return
    compiler, traced = _StandIn(COMPILER), _StandIn(TRACED)
    for mark in ("allow_in_graph", "assume_constant_result", "disable"):
        vars(compiler)[mark] = _mark
    # A package's, for who imports a module within it.
    compiler.__path__ = []
    vars(traced)["TransformGetItemToIndex"] = TransformGetItemToIndex
    for module in (compiler, traced):
        # For who only asks whether it is there.
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is compiler)
    sys.modules |= {COMPILER: compiler, TRACED: traced}
    sys.meta_path.insert(0, _Within)
