"""``serve-app train-lora``: its options, and what becomes of the result."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from serve_app.distill.command import weights_of

HELP = {
    "rank": "of the adapter's matrices (default 8)",
    "alpha": "scale, divided by the rank (default: twice the rank)",
    "modules": "linears to adapt, such as q_proj,v_proj (default: all of the layers')",
    "epochs": "how often the data is gone through (default 3)",
    "steps": "optimiser steps, in place of epochs",
    "batch_tokens": "tokens per step, padding included (default 2048)",
    "max_tokens": "longer lines are left out (default 1024)",
    "lr": "highest learning rate (default 0.001)",
    "held_out": "share of the lines that is not learnt from and serves the score (default 0.05)",
    "seed": "of everything random; the same command makes the same adapter on the same machine",
    "threads": "CPU threads (default: torch's)",
    "dtype": "the model's: auto, float32, bfloat16",
    "device": "cpu or cuda",
    "save_every": "steps between saved states",
    "stop_at": "stop after this step; the same command without it goes on",
}
KINDS: dict[str, Any] = {
    "alpha": float,
    "modules": lambda text: tuple(part for part in text.split(",") if part),
    "epochs": float,
    "lr": float,
    "held_out": float,
    "dtype": str,
    "device": str,
}


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Adds the command to ``serve-app``. Imports nothing heavy."""
    parser = commands.add_parser("train-lora", help="train a LoRA adapter for a model on your own data")
    parser.add_argument("model", help="a catalogue id, or a directory in Hugging Face format")
    parser.add_argument("--data", required=True, help='JSON lines with "messages" or "text"')
    parser.add_argument("--out", help="directory for the result; an interrupted run goes on from there")
    parser.add_argument("--register", metavar="NAME", help="upload the result to the running server under this name")
    parser.add_argument("--public", action="store_true", help="with --register: for all accounts")
    for name, text in HELP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, type=KINDS.get(name, int))
    parser.set_defaults(command=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0, or 2 with the reason on standard error."""
    from serve_app.client.adapters import Adapters
    from serve_app.client.server import Server, ServerError
    from serve_app.finetune.train import BadData, Options, TrainingRefused, UnsupportedModel, train

    arguments.out = arguments.out or f"{Path(arguments.data).stem}-lora"
    given = {f.name: value for f in fields(Options) if (value := getattr(arguments, f.name, None)) is not None}
    try:
        if arguments.register and not arguments.model.startswith("@"):
            raise TrainingRefused("--register needs a model of the catalogue; give its id")
        # Asked before the training, not after it.
        adapters = Adapters(Server.connect()) if arguments.register else None
        if adapters is not None:
            adapters.list()
        found = train(Options(**given), weights_of(arguments.model), lambda line: print(line, flush=True))
        if found is not None and adapters is not None:
            adapters.upload(Path(arguments.out), arguments.register, arguments.model, public=arguments.public)
            print(f'registered: requests for {arguments.model} may say "lora": "{arguments.register}"')
    except (TrainingRefused, BadData, UnsupportedModel, ServerError) as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 2
    return 0
