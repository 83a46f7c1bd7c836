"""The modules of a base model, by which adapters are checked: found once for each configuration and kept in the state
directory, by whoever loads the model, or else by a short process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serve_app.sealed import read_sealed, write_sealed

# Building a model of hundreds of layers without weights takes seconds; importing what builds it takes more.
TIMEOUT_S = 300.0
_FORM = 4
ROOT = Path(__file__).resolve().parents[2]


class NoShapes(RuntimeError):
    """The base model cannot be built from its configuration."""


@dataclass(slots=True, frozen=True)
class Base:
    """``linears``: [out, in] of each linear layer, by its name in transformers. ``others``: of all other modules that
    an adapter could be meant for, what they are. ``kind``: the configuration's model_type. ``weights``: by module,
    those of experts ([experts, out, in]) and of routers ([out, in]), in the module's order.
    """

    linears: dict[str, tuple[int, int]]
    others: dict[str, str]
    kind: str = ""
    weights: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)

    def size(self, name: str) -> tuple[int, ...] | None:
        """Of a linear, or of a weight."""
        module, _, own = name.rpartition(".")
        return self.linears.get(name) or self.weights.get(module, {}).get(own)

    @property
    def experts(self) -> dict[str, int]:
        """How many there are, by weight."""
        return {f"{m}.{name}": s[0] for m, own in self.weights.items() for name, s in own.items() if len(s) == 3}


def kept_at(folder: Path, home: Path) -> Path:
    """Where the modules of the model whose configuration lies in ``folder`` are kept. Names of modules differ between
    versions of transformers.
    """
    config = (folder / "config.json").read_bytes()
    named = hashlib.sha256(f"{_FORM} {version('transformers')} ".encode() + config).hexdigest()
    return home / "adapters" / f"{named}.json"


def base_of(folder: Path, home: Path) -> Base:
    """The modules of the model in ``folder``. Blocks, for seconds where nobody has looked before. Raises
    :class:`NoShapes`.
    """
    path = kept_at(folder, home)
    if (found := _read(path)) is None:
        _describe(folder, home)
        found = _read(path)
    if found is None:
        raise NoShapes(f"what was found out about the model of {folder} could not be read again from {path}")
    return found


def keep(found: dict[str, Any], folder: Path, home: Path) -> None:
    """Keeps what `serve_app.models.loading.bare.describe` has found."""
    write_sealed(kept_at(folder, home), json.dumps(found).encode())


def _read(path: Path) -> Base | None:
    """None where nobody has looked before, or what was found is damaged."""
    data = read_sealed(path)
    return None if data is None else _parsed(data)


@lru_cache(64)
def _parsed(data: bytes) -> Base:
    found = json.loads(data)
    linears = {name: (out, into) for name, (out, into) in found["linears"].items()}
    weights = {module: {name: tuple(size) for name, size in own.items()} for module, own in found["weights"].items()}
    return Base(linears, found["others"], found["kind"], weights)


def _describe(folder: Path, home: Path) -> None:
    command = [sys.executable, "-P", "-m", "serve_app.models.loading.bare", str(folder), str(home)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoShapes(f"the model of {folder} could not be built within {TIMEOUT_S:g} seconds") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NoShapes(f"the model of {folder} could not be built: {said[:300]}")
