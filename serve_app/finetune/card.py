"""The README.md of a trained adapter: what it is for, how it was made and what it brings."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_app.finetune.train import Options, Trained

# Where the files are and how the machine was used says nothing of the adapter.
_LEFT_OUT = ("model", "data", "out", "threads", "save_every", "stop_at")


def write_card(out: Path, options: Options, trained: Trained) -> None:
    base = base_name(options.model)
    before, after = trained.before, trained.after
    (out / "README.md").write_text(
        f"""# A LoRA adapter for {base}

Trained by `{command(options)}` on {trained.samples} lines, in {trained.steps} steps.

On {after.tokens} tokens of lines that it did not learn from:

| | loss | tokens foreseen |
| --- | --- | --- |
| {base} | {before.loss:.3f} | {before.right:.1%} |
| with this adapter | {after.loss:.3f} | {after.right:.1%} |
"""
    )


def base_name(model: str) -> str:
    """A model's id, or its directory's name: no path of this machine."""
    return model if model.startswith("@") else Path(model).name


def command(options: Options) -> str:
    """What makes the same adapter."""
    base = base_name(options.model)
    words = ["serve-app", "train-lora", base, "--data", Path(options.data).name]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _LEFT_OUT or value == field.default:
            continue
        shown = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else value
        words += [f"--{field.name.replace('_', '-')}", str(shown)]
    return shlex.join(words)
