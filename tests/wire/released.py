"""The messages of the last release, which those of the next must be read by: written down with each release."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import serve_app.wire
from serve_app.wire.message import Message

FILE = Path(__file__).with_name("released.json")


def read() -> dict[str, Any]:
    """``messages``: the fields of each tag; ``tuples``: of what lies inside of messages and takes no more fields."""
    return json.loads(FILE.read_text())


def _declared() -> list[type]:
    modules = (
        importlib.import_module(f"serve_app.wire.{m.name}") for m in pkgutil.iter_modules(serve_app.wire.__path__)
    )
    return [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]


def messages() -> dict[str, list[str]]:
    kinds = [kind for kind in _declared() if issubclass(kind, Message) and kind is not Message]
    return {kind.tag(): list(kind.__struct_fields__) for kind in kinds}


def tuples() -> dict[str, list[str]]:
    return {kind.__name__: list(kind._fields) for kind in _declared() if issubclass(kind, tuple)}


if __name__ == "__main__":
    FILE.write_text(json.dumps({"messages": messages(), "tuples": tuples()}, indent=1, sort_keys=True) + "\n")
