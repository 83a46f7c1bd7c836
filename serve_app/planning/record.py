"""A catalogue record that serves a model as a plan has it."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import yaml

from serve_app.catalog.records import ModelRecord
from serve_app.catalog.tasks import declared
from serve_app.planning.plan import Plan
from serve_app.planning.source import published
from serve_app.planning.wanted import WANTED_FIELDS, wanted_of


class NotWritten(ValueError):
    """The record can't be written; the text has the remedy."""


def _decodes() -> str:
    """The task whose models decode, which is what is planned."""
    return next(task.name for task in declared().values() if "decode" in task.stages)


def record_of(plan: Plan, record: ModelRecord | None, name: str, prefill: Plan | None = None) -> dict[str, Any]:
    """The record's values; ``prefill``: the plan of a stage for prompts, if there is one. A model that has a record
    keeps it, but for the profile that is planned. Raises :class:`NotWritten`.
    """
    context = min(plan.model.context or plan.tokens, plan.tokens)
    if record is not None:
        values = record.model_dump(mode="json", exclude_defaults=True)
    elif name in published():
        raise NotWritten(f"{name} is a configuration without weights; give a folder, or write the repository yourself")
    else:
        short = re.sub(r"[^\w.-]", "-", Path(name).resolve().name).lower()
        values = {
            "id": f"@cf/local/{short}", "task": _decodes(), "description": f"{plan.model.name}, as planned.",
            "created_at": datetime.date.today().isoformat(), "weights": {"path": str(Path(name).resolve())},
            "properties": {"context_window": context},
        }  # fmt: skip
    # As it was planned, and not as a record that is there says it.
    wanted = plan.model.wanted
    if record is None or wanted != wanted_of(record):
        lora = values.get("lora")
        for field in WANTED_FIELDS:
            values.pop(field, None)
        values |= wanted.as_record()
        if wanted.adapters and lora:
            values["lora"] = lora
    profile = {"decode": _stage_of(plan)}
    if prefill is not None:
        profile["prefill"] = _stage_of(prefill)
    values.setdefault("serving", {})["local" if plan.asked.device.cpu else "gpu"] = profile
    return values


def _stage_of(plan: Plan) -> dict[str, Any]:
    asked, split = plan.asked, plan.split
    # What is left is for the cache; the rest of it belongs to who measures again at load.
    cache = min(plan.left) // (1 << 20)
    stage: dict[str, Any] = {
        "max_replicas": split.replicas, "kv_cache_bytes": f"{cache}MiB", "max_batch_tokens": asked.batch_tokens,
        "max_num_seqs": asked.sequences,
    }  # fmt: skip
    if not asked.device.cpu:
        stage |= {"num_gpus": 1, "gpu_memory_utilization": asked.utilization}
    if split.tensor > 1:
        stage["tensor_parallel"] = split.tensor
    if split.pipeline > 1:
        stage["pipeline_parallel"] = split.pipeline
    if split.expert:
        stage["expert_parallel"] = split.tensor
    if split.travel:
        stage["expert_dispatch"] = "always"
    if split.copies:
        stage["expert_copies"] = split.copies
    return stage


def write_record(plan: Plan, record: ModelRecord | None, name: str, file: Path, prefill: Plan | None = None) -> None:
    """Writes ``file``; a record that the catalogue would refuse is not written. Raises :class:`NotWritten`."""
    values = record_of(plan, record, name, prefill)
    try:
        ModelRecord.model_validate(values)
    except ValueError as error:
        raise NotWritten(f"the catalogue would refuse the record: {error}") from error
    if file.exists():
        raise NotWritten(f"{file} exists; remove it, or name another")
    file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
