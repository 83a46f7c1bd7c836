"""One model's application: what the stage's module that its requests are sent to binds of its record."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ray.serve import Application

from deployments.blueprint import Blueprint
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.config import Settings


def model_application(
    record: ModelRecord,
    profile: Profile,
    settings: Settings,
    source: Path,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> Application:
    """One model's deployments, each with its own replicas and autoscaling. ``versions``: of those that run and whose
    replicas go on, by name.
    """
    model = Blueprint(record, profile, settings, source, versions)
    return home(record).application(model)


def home(record: ModelRecord) -> Any:
    """The module of the stage that the model's requests are sent to; its ``application`` binds all stages."""
    return importlib.import_module(f"deployments.{record.task_declaration.stages[0]}")
