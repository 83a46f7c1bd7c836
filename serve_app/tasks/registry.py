"""The tasks there are, as what runs them; `serve_app.catalog.tasks` has what they declare."""

from __future__ import annotations

import importlib
from functools import cache

from serve_app.api.types import Asked
from serve_app.catalog.tasks import declared, folders
from serve_app.tasks.task import Task


def tasks() -> dict[str, Task]:
    """Every task by name, in the order of their declarations."""
    found = _load(tuple(folders()))
    return {name: found[name] for name in declared()}


def taking(request: type[Asked]) -> list[Task]:
    """The tasks whose models run requests of this type."""
    return [task for task in tasks().values() if issubclass(request, task.takes)]


@cache
def _load(packages: tuple[str, ...]) -> dict[str, Task]:
    loaded: list[Task] = [importlib.import_module(f"{package}.task").TASK for package in packages]
    return {task.declaration.name: task for task in loaded}
