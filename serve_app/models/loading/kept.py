"""What checks of models have found, kept for the next start: by the code, and by what else a result depends on."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from serve_app.kernels.library.build import cache_root
from serve_app.sealed import read_sealed, write_sealed

log = logging.getLogger(__name__)

T = TypeVar("T")
_ROOT = Path(__file__).resolve().parents[2]


def read(kind: type[T], *depends_on: str) -> T | None:
    """A dataclass that an earlier start has written; None: there is none."""
    try:
        data = read_sealed(_file(kind, depends_on))
        return None if data is None else kind(**json.loads(data))
    except (ValueError, TypeError):
        return None


def write(found: Any, *depends_on: str) -> None:
    """``found``: a dataclass of plain values."""
    try:
        write_sealed(_file(type(found), depends_on), json.dumps(asdict(found)).encode())
    except OSError as error:  # a read-only home costs the next start a second
        log.info("the result of a model's check is not kept: %s", error)


def described(config: Any) -> str:
    """A configuration of transformers, without what changes nothing."""
    values = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return json.dumps(values, sort_keys=True, default=str)


@functools.cache
def code_version() -> str:
    """A digest of the code that a result depends on, with the versions of what it stands on."""
    import transformers

    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in ("engine", "kernels", "models", "parallel"):
        for file in sorted((_ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(_ROOT).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _file(kind: type, depends_on: tuple[str, ...]) -> Path:
    said = " ".join((kind.__module__, code_version(), *depends_on))
    return cache_root().parent / "checks" / f"{hashlib.sha256(said.encode()).hexdigest()[:40]}.json"
