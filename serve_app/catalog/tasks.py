"""What the catalogue knows of a task: plain data, declared in the task's own folder.

A task is a folder of the package `serve_app.tasks` with a module ``declaration`` that holds ``DECLARATION``. Folders
are found by looking; nothing lists them. The package's path may have several directories, so that a task can lie
elsewhere.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

ROOM = "serve_app.tasks"


@dataclass(slots=True, frozen=True)
class TaskDeclaration:
    """One task. ``name`` is what records and rate limits call it; of ``stages``, its deployments, the first is the one
    that requests are sent to.
    """

    name: str
    stages: tuple[str, ...]
    # What models/search shows: Cloudflare's id and name where it has the task.
    listed_id: str
    listed_name: str
    description: str
    # A native body, shown at start and in the API's description.
    example: Mapping[str, Any]
    # What its usage is counted and priced in: keys of `pricing.UNITS`.
    units: tuple[str, ...] = ("input", "cached")
    # OpenTelemetry's name of what it does (GenAI semantic conventions); "": it has none, and the task's own is told.
    operation: str = ""
    # Requests per minute and account that Workers AI allows.
    rate_limit: int | None = None
    # Stages without which a model answers as well, only more slowly.
    optional_stages: tuple[str, ...] = ()
    # Stages that answer a request from begin to end; none: only the one that requests are sent to.
    answering_stages: tuple[str, ...] = ()
    # What clients know its requests as, who have a form of their own for them (models/search's property); "": none.
    interface: str = ""
    # Fields of records that only some tasks have.
    record_fields: frozenset[str] = field(default_factory=frozenset)
    # Lower comes first in lists.
    order: int = 100
    # On a small machine its models start before those of other tasks.
    starts_first: bool = False

    @property
    def listed(self) -> dict[str, str]:
        """The task as models/search has it."""
        return {"id": self.listed_id, "name": self.listed_name, "description": self.description}


def task_path() -> tuple[str, ...]:
    """Where tasks are looked for; what is known of them holds for one such path."""
    # Asked for each line of a batch, and an import that is there already takes longer than all else.
    return tuple((sys.modules.get(ROOM) or importlib.import_module(ROOM)).__path__)


def declared() -> Mapping[str, TaskDeclaration]:
    """Every task by name, in order."""
    return _declared(task_path())


def folders() -> list[str]:
    """The packages that declare a task."""
    return _folders(task_path())


def folder_of(task: str) -> str:
    """The package that declares ``task``. Raises KeyError."""
    return _folder_of(task_path())[task]


def stage_names() -> tuple[str, ...]:
    """Every stage that some task declares."""
    return _stage_names(task_path())


@cache
def _folders(path: tuple[str, ...]) -> list[str]:
    return [f"{ROOM}.{module.name}" for module in pkgutil.iter_modules(path) if module.ispkg]


@cache
def _folder_of(path: tuple[str, ...]) -> Mapping[str, str]:
    return {importlib.import_module(f"{folder}.declaration").DECLARATION.name: folder for folder in _folders(path)}


@cache
def _stage_names(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stage for task in _declared(path).values() for stage in task.stages))


@cache
def _declared(path: tuple[str, ...]) -> Mapping[str, TaskDeclaration]:
    found = [importlib.import_module(f"{folder}.declaration").DECLARATION for folder in _folders(path)]
    names = [task.name for task in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two folders of {ROOM} declare the task {twice[0]!r}; give one of them another name")
    return {task.name: task for task in sorted(found, key=lambda task: (task.order, task.name))}
