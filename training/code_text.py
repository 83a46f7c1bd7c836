"""Source text of pure-Python functions of the covered modules, for code completion."""

from __future__ import annotations

import importlib
import inspect

from training.facts import Fact
from training.symbols import CORE, OTHER

SKIP = {"builtins", "inspect", "unittest.mock", "configparser", "asyncio", "typing", "ssl", "pickle", "uuid"}


def functions(max_chars: int = 2400) -> list[str]:
    """Sources of functions and methods defined in the covered modules, in a fixed order, without
    duplicates.
    """
    out: dict[str, None] = {}
    for path in CORE + OTHER:
        if path in SKIP:
            continue
        module = importlib.import_module(path)
        for _, value in sorted(vars(module).items()):
            members = [value] if inspect.isfunction(value) else []
            if inspect.isclass(value):
                members = [m for _, m in sorted(vars(value).items()) if inspect.isfunction(m)]
            for member in members:
                if member.__module__ != module.__name__:
                    continue
                try:
                    source = inspect.getsource(member)
                except (OSError, TypeError):
                    continue
                source = inspect.cleandoc("\n" + source.expandtabs()) + "\n"
                if 60 <= len(source) <= max_chars:
                    out[source] = None
    return list(out)


def stub(fact: Fact) -> str:
    """A signature with its docstring: `def sqrt(x):` followed by the fact."""
    home, _, last = fact.name.rpartition(".")
    try:
        signature = str(inspect.signature(getattr(importlib.import_module(home or "builtins"), last)))
    except (ValueError, TypeError, AttributeError, ImportError):
        return ""
    if len(signature) > 100 or "0x" in signature or "<" in signature:
        return ""
    tail = fact.tail.lstrip(": ")
    return f'# {fact.module}\ndef {last}{signature}:\n    """{tail[0].upper()}{tail[1:]}"""\n'
