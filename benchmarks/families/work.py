"""What one process does: one architecture, from its checkpoint to its line."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import encoding, generation
from benchmarks.families.architectures import Architecture, write_checkpoint


@dataclass(slots=True)
class Line:
    """One line of the table. ``verdict``: exact, wrong, refused, failed (the product raised or ended), or untried (no
    checkpoint could be made, or transformers itself can't run it)."""

    task: str
    model_type: str
    architecture: str
    variant: str
    served: str
    verdict: str
    note: str
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(architecture: Architecture, seed: int) -> Line:
    """Builds, loads and compares one architecture; whatever it raises becomes a line."""
    started = time.perf_counter()

    def line(served: str, verdict: str, note: str) -> Line:
        seconds = round(time.perf_counter() - started, 2)
        a = architecture
        return Line(a.task, a.model_type, a.name, a.variant, served, verdict, " ".join(note.split()), seconds)

    with tempfile.TemporaryDirectory(prefix="families-") as name:
        folder = Path(name)
        try:
            model_class, config = write_checkpoint(architecture, folder, seed)
            runs_at_all(model_class, folder)
        except Exception as error:
            return line("-", "untried", f"{type(error).__name__}: {error}"[:300])
        try:
            if architecture.task == "text-generation":
                return line(*generation.compare(model_class, folder, seed))
            return line(*encoding.compare(model_class, folder, seed, architecture.task))
        except Exception as error:
            if os.environ.get("FAMILIES_TRACE"):
                traceback.print_exc()
            return line("-", "failed", f"{type(error).__name__}: {error}"[:300])


@torch.inference_mode()
def runs_at_all(model_class: Any, folder: Path) -> None:
    """Raises where transformers itself can't run what it has written."""
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    known = getattr(model.config.get_text_config(), "vocab_size", None) or 45
    model(input_ids=5 + torch.arange(40)[None] % (min(known, 45) - 5))


def serve(connection: Connection, architecture: Architecture, seed: int) -> None:
    """The process's main: sends one :class:`Line`."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    connection.send(examine(architecture, seed))
    connection.close()
