"""What the Dockerfile says, for CPUs and for GPUs. That it builds what runs is `test_container.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve_app import kubernetes
from tests.cluster.container import dockerfile
from tests.cluster.container.dockerfile import Ignored, Recipe

ROOT = Path(__file__).resolve().parents[2]
BASE = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.fixture(params=["cpu", "cu130"])
def recipe(request: pytest.FixtureRequest) -> Recipe:
    given = {} if request.param == "cpu" else {"TORCH": request.param}
    made = dockerfile.read((ROOT / "Dockerfile").read_text(), BASE, **given)
    [chosen] = {step.variables["TORCH"] for step in made.steps if "torch-backend" in step.words}
    assert chosen == request.param
    return made


def test_it_installs_the_locks_by_hash_and_torch_by_version(recipe: Recipe) -> None:
    lines = [line for run in recipe.runs for line in run.split("&&")]
    installs = [line for line in lines if " pip install " in f" {line}" and " -r " in line]
    files = [name for line in installs for name in re.findall(r"-r (\S+)", line)]
    assert files == ["requirements/lock.txt", "requirements/s3.txt", "requirements/torch.txt"]
    for line in installs:
        names = re.findall(r"-r (\S+)", line)
        assert all((ROOT / name).is_file() for name in names)
        by_hash = all("--hash=sha256:" in (ROOT / name).read_text() for name in names)
        assert by_hash == ("--require-hashes" in line)
        # Else each process compiles all that it imports, every time: nobody can write there.
        assert "--compile-bytecode" in line
    assert [line for line in lines if "--torch-backend=${TORCH}" in line] == [installs[-1]]
    # Whatever else is installed has its version.
    for line in lines:
        if "pip install" in line and " -r " not in line and "--editable ." not in line:
            assert all("==" in word for word in line.split("install", 1)[1].split() if not word.startswith("-"))


def test_all_that_it_copies_is_there_and_all_that_it_needs_is_copied(recipe: Recipe) -> None:
    for source in recipe.copied:
        assert (ROOT / source).exists() and list(dockerfile.context(ROOT, source)), source
    brought = {str(path) for source in recipe.copied for path in dockerfile.context(ROOT, source)}
    assert {
        "pyproject.toml", "LICENSE", "serve_app/app.py", "serve_app/ray_private/haproxy.sh", "deployments/gateway.py",
        "requirements/lock.txt", "serve_app/catalog/models/pico-instruct.yaml",
    } <= brought  # fmt: skip
    assert any(path.startswith("checkpoints/pico-instruct/") for path in brought)
    kept_out = re.compile(r"(^|/)(\.git|\.venv|__pycache__|tests|node_modules|\.env[^/]*|[^/]*\.pyc)(/|$)")
    assert [path for path in brought if kept_out.search(path)] == []


def test_nobody_is_root_and_nothing_is_written_beside_the_volumes(recipe: Recipe) -> None:
    assert recipe.folder == kubernetes.PROJECT and recipe.user == str(kubernetes.USER)
    assert recipe.volumes == [kubernetes.STATE] and recipe.ports == [8000]
    assert recipe.command == ["serve-app", "serve"]
    assert all(step.variables.get("HOME") is None for step in recipe.steps), "a build that writes into the volume"
    written = ("HOME", "SERVE_APP_HOME", "HF_HOME", "TRITON_CACHE_DIR")
    assert all(recipe.environment[name].startswith(f"{kubernetes.STATE}/") for name in written)
    assert recipe.environment["PYTHONDONTWRITEBYTECODE"] == "1" and recipe.environment["SERVE_APP_HOST"] == "0.0.0.0"
    assert recipe.environment["PATH"] == f"{kubernetes.PROJECT}/.venv/bin:{BASE['PATH']}"
    [last] = [step for step in recipe.steps if "useradd" in step.words]
    assert last is recipe.steps[-1], "what comes later could be written by others"
    assert f"--uid {kubernetes.USER} " in last.words


def test_the_base_is_a_python_that_the_project_supports() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert dockerfile.read(text, BASE).base == "python:3.12-slim"
    assert dockerfile.read(text, BASE, PYTHON="3.11").base == "python:3.11-slim"
    with pytest.raises(ValueError, match="TORHC"):
        dockerfile.read(text, BASE, TORHC="cu130")


def test_programs_that_pods_call_are_installed(recipe: Recipe) -> None:
    [apt] = [run for run in recipe.runs if run.startswith("apt-get")]
    # wget: KubeRay's probe of workers; g++: the kernels for CPUs and Triton's launchers.
    assert {"g++", "wget"} <= set(apt.split())


def test_instructions_are_read_as_docker_reads_them() -> None:
    text = """\
# a comment
ARG TAG=1
FROM base:${TAG}
ARG NAME=one
ENV A=x B="two words" C=$A
RUN first \\
    # inside
    && second $NAME
WORKDIR sub
COPY a b target/
USER ${NAME}
CMD ["x", "y"]
"""
    made = dockerfile.read(text, {"A": "base"}, NAME="two")
    assert made.base == "base:1" and made.user == "two" and made.folder == "/sub"
    # Variables of one ENV see what was before it.
    assert made.environment == {"A": "x", "B": "two words", "C": "base"}
    run, copy = made.steps
    assert run.words.split() == ["first", "&&", "second", "$NAME"] and run.folder == "/"
    assert run.variables["NAME"] == "two" and copy.folder == "/sub" and made.copied == ["a", "b"]
    for wrong in ("FROM a\nFROM b", "FROM a\nADD x y", "FROM a\nRUN <<END", "FROM a\nCOPY --from=b c d"):
        with pytest.raises(ValueError, match="not read here"):
            dockerfile.read(wrong, {})


def test_the_context_is_ignored_as_docker_ignores_it() -> None:
    ignored = Ignored("# no\n.git\n**/__pycache__\n**/*.egg-info\ntraining/.state\n.env.*\nlogs/*\n!logs/keep\n")
    for path in (
        ".git", ".git/HEAD", "__pycache__/a.pyc", "a/b/__pycache__/c", "x.egg-info/y", "training/.state/z", ".env.a",
        "logs/other",
    ):  # fmt: skip
        assert ignored(path), path
    for path in (".github/x", "a/.git", "training/a.state", "logs/keep", "env.a", "no"):
        assert not ignored(path), path
