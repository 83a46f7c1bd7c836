"""``serve-app train-draft``: its options, and from a model's id or directory to its weights."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

HELP = {
    "prompts": "file with one prompt a line, text or JSON with prompt, messages or ids (default: built-in ones)",
    "steps": "optimiser steps",
    "tokens": "drafts per step of the target that it is trained and measured for",
    "answer_tokens": "most tokens of each answer that the model writes for training",
    "temperature": "of these answers; 0 is greedy",
    "batch_tokens": "tokens per optimiser step",
    "lr": "highest learning rate (default 0.002)",
    "hidden": "width of a draft model (default: a third of the target's)",
    "inner": "width of the MLP (default: the target's for a head, four times the width for a model)",
    "layers": "layers of a draft model (default 2)",
    "heads": "query heads of an EAGLE-3 head (default: the target's)",
    "kv_heads": "key/value heads of an EAGLE-3 head (default: the target's)",
    "draft_vocab": "tokens an EAGLE-3 head can draft (default: those that make up 99.9 %% of the answers)",
    "tie_output": "an EAGLE-3 head drafts with the target's own output weights: smaller, but read by this server only",
    "capture": "three layers of the target whose input an EAGLE-3 head reads, e.g. 2,16,29",
    "compare": "another draft's directory, to be measured on the same prompts",
    "seed": "of everything random; the same command makes the same draft on the same machine",
    "threads": "CPU threads (default: torch's)",
    "dtype": "the target's: auto, float32, bfloat16",
    "device": "cpu or cuda",
    "save_every": "steps between saved states",
    "stop_at": "stop after this step; the same command without it goes on",
}


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Adds the command to ``serve-app``. Imports nothing heavy."""
    parser = commands.add_parser(
        "train-draft", help="distil a draft model or an EAGLE-3 head from a model's own answers"
    )
    parser.add_argument("model", help="a directory in Hugging Face format, or a catalogue id")
    parser.add_argument("--method", choices=("model", "eagle3"), required=True, help="what to train")
    parser.add_argument("--out", required=True, help="directory for the result; an interrupted run goes on from there")
    kinds = {
        "prompts": str,
        "temperature": float,
        "lr": float,
        "compare": str,
        "capture": _layers,
        "dtype": str,
        "device": str,
    }
    for name, text in HELP.items():
        kind: dict[str, Any] = {"type": kinds.get(name, int)}
        if name == "tie_output":
            kind = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **kind)
    parser.set_defaults(command=run)
    return parser


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0, or 2 with the reason on standard error."""
    from serve_app.distill.memory import TooLittleMemory
    from serve_app.distill.train import BadPrompts, Options, TrainingRefused, UnsupportedModel, train

    given = {f.name: value for f in fields(Options) if (value := getattr(arguments, f.name, None)) is not None}
    try:
        train(Options(**given), weights_of(arguments.model), lambda line: print(line, flush=True))
    except (TrainingRefused, BadPrompts, UnsupportedModel, TooLittleMemory) as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 2
    return 0


def weights_of(model: str) -> Path:
    """The directory of a model given by path or by catalogue id; fetched first if need be."""
    if not model.startswith("@"):
        return Path(model)
    from serve_app.catalog.errors import CatalogError
    from serve_app.catalog.load import load_catalog
    from serve_app.catalog.weights import resolve
    from serve_app.config import load_settings

    settings = load_settings()
    catalog = load_catalog(settings.home)
    record = catalog.get(model)
    if record is None:
        raise CatalogError("train-draft", model, "no such model in the catalogue", "`serve-app models` lists them.")
    if "draft" not in record.task_declaration.record_fields:
        raise CatalogError("train-draft", model, f"{record.task} models have no draft", "Name one that generates text.")
    return resolve(record.weights, settings.home, source=catalog.source(model))
