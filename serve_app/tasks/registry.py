"""The tasks there are, as what runs them; `serve_app.catalog.tasks` has what they declare."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from serve_app.api.fields.content import MEDIA
from serve_app.api.types import TaskRequest
from serve_app.catalog.tasks import declared, folders, task_path
from serve_app.tasks.model import ServedModel
from serve_app.tasks.task import BodyLimits, Task


def tasks() -> Mapping[str, Task]:
    """Every task by name, in the order of their declarations."""
    return _load(task_path())


def taking(request: type[TaskRequest]) -> list[Task]:
    """The tasks whose models run requests of this type."""
    return [task for task in tasks().values() if issubclass(request, task.takes)]


def body_limit(model: ServedModel, settings: BodyLimits) -> int:
    """Bytes of a body for ``model``: pictures and sounds in conversations are large."""
    limit = tasks()[model.record.task].body_limit(settings)
    return max(limit, settings.max_media_body_bytes) if model.takes & MEDIA else limit


@cache
def _load(path: tuple[str, ...]) -> Mapping[str, Task]:
    loaded: list[Task] = [importlib.import_module(f"{package}.task").TASK for package in folders()]
    found = {task.declaration.name: task for task in loaded}
    return MappingProxyType({name: found[name] for name in declared()})
