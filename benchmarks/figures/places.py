"""What commands name: checkpoints made for the occasion, shipped ones, and peers that are installed elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import CHECKPOINTS, ROOT
from benchmarks.engine.checkpoint import SIZES
from benchmarks.serving.stack import write_checkpoint

# Where each is found: an environment variable with the path of a peer's Python, or of the trace.
PEERS = {
    "vllm": "FIGURES_VLLM",
    "litellm": "FIGURES_LITELLM",
    "sentence-transformers": "FIGURES_SENTENCE_TRANSFORMERS",
    "trace": "FIGURES_TRACE",
}


def peers(given: dict[str, str | None]) -> dict[str, str]:
    """Paths of the peers that are there, as options or the environment give them. Raises :class:`SystemExit` for one
    that is given and is not there.
    """
    found = {}
    for name, variable in PEERS.items():
        path = given.get(name) or os.environ.get(variable)
        if not path:
            continue
        if not Path(path).exists():
            raise SystemExit(f"{variable}: there is no {path}")
        found[name] = str(Path(path).absolute())
    return found


def place(name: str, scratch: Path, found: dict[str, str]) -> str:
    """The path behind ``{name}`` in a command."""
    if name in found:
        return found[name]
    if name in SIZES:
        folder = scratch / name
        return str(folder if folder.exists() else write_checkpoint(folder, name))
    if name == "minilm":
        return str(_minilm())
    return str({"pico": CHECKPOINTS / "pico-instruct", "text": ROOT / "docs" / "operations.md"}[name])


def _minilm() -> Path:
    from serve_app.catalog.load import BUILT_IN, load_record
    from serve_app.catalog.weights import resolve
    from serve_app.config import load_settings

    record = load_record(BUILT_IN / "all-minilm-l6-v2.yaml")
    return resolve(record.weights, load_settings().home)
