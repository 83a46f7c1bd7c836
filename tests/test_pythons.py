"""The other Pythons that are supported: what is locked installs there as `make` does it, our modules are imported,
tests run, and the engine answers what it answers here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_locks import PYTHONS

ROOT = Path(__file__).resolve().parents[1]
OTHERS = [version for version in PYTHONS if version != f"{sys.version_info[0]}.{sys.version_info[1]}"]
# What it takes for torch to be fetched as a build for GPUs, whose libraries are several GB.
LARGE = "LARGE_TORCH"
# Tests that need neither torch nor a running server.
PLAIN = (
    "api", "catalog", "channel", "costs", "kv", "routing", "state", "wire", "gateway/http", "gateway/resume",
    "gateway/dispatch/test_owner.py", "gateway/test_webhooks.py",
)  # fmt: skip
# Imports everything of ours but what asks for a module that is not installed; prints how many modules, and what failed.
IMPORTS = """
import importlib, json, pkgutil, sys
import deployments, serve_app
names = [m.name for package in (serve_app, deployments)
         for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda _: None)
         if not m.name.endswith("__main__")]
fine, failed = 0, {}
for name in names:
    try:
        importlib.import_module(name)
        fine += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in sys.argv[1:]:
            failed[name] = repr(error)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps([fine, failed]))
"""


def interpreter(version: str) -> str | None:
    """One of ``version`` that runs: on PATH, or among pyenv's, whose names on PATH may lead nowhere."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    named = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))]
    for found in map(str, filter(None, named)):
        asked = subprocess.run([found, "-c", "import sys, venv; print(sys.version)"], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return found
    return None


def run(*command: str, seconds: float = 3000) -> str:
    """What it prints. Fails with the end of that if it does."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(command)[:200]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=OTHERS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an environment with all that `make install-dev` installs but torch, whose builds differ."""
    version = request.param
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} is at hand")
    venv = tmp_path_factory.mktemp(f"python{version}") / "venv"
    run("make", "install-dev", f"VENV={venv}", f"PYTHON={found}", "TORCH=/dev/null")
    yield str(venv / "bin" / "python")
    shutil.rmtree(venv)


@pytest.mark.slow
def test_all_but_the_engine(python: str) -> None:
    """Hashes are those of files for this Python, and nothing of ours has gone from the language or the library."""
    extras = ("torch", "markitdown", "diffusers", "atheris")
    fine, failed = json.loads(run(python, "-c", IMPORTS, *extras).splitlines()[-1])
    assert failed == {} and fine > 700
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{each}" for each in PLAIN))


@pytest.mark.slow
def test_the_engine_answers_as_it_does_here(python: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    pip = (python, "-m", "pip", "install", "--quiet", "-r", str(ROOT / "requirements" / "torch.txt"))
    run(*pip, "--dry-run", f"--report={report}")
    wanted = [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]]
    large = [name for name in wanted if name.startswith(("nvidia", "cuda"))]
    if large and LARGE not in os.environ:
        pytest.skip(f"torch is a build for GPUs here, with {len(large)} large libraries: {LARGE}=1 fetches them")
    run(*pip)
    fine, failed = json.loads(run(python, "-c", IMPORTS, "markitdown", "diffusers", "atheris").splitlines()[-1])
    assert failed == {} and fine > 900
    asked = ("-m", "tests.one_answer")
    assert json.loads(run(python, *asked)) == json.loads(run(sys.executable, *asked))
