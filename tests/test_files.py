"""What files of the project may hold, and how long they may be."""

import ast
import os
import re
from pathlib import Path

from serve_app.state.migrations import HEAD
from tests.imports import MODULES, OURS, ROOT, within


def test_no_file_names_a_machine_or_a_package_index() -> None:
    """Paths of one computer and addresses of package registries have no place in the project."""
    suffixes = {".py", ".md", ".yaml", ".toml", ".txt", ".in", ".cpp", ".h", ""}
    skipped = {".git", ".venv", "tests", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "checkpoints"}
    paths = r"(?<!\w)/(root|work)/|/home/(?!ubuntu/)|/opt/(wheels|pypi)"
    words = re.compile(rf"{paths}|pypi\.org|pythonhosted|--(extra-)?index-url [^-]")
    found = []
    for folder, folders, names in os.walk(ROOT):
        # An environment has a hundred thousand files.
        out = skipped if Path(folder) == ROOT else set()
        folders[:] = set(folders) - {"__pycache__"} - out
        for path in (Path(folder, name) for name in set(names) - out):
            if path.suffix not in suffixes or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {text[at.start() :][:80]!r}" for at in words.finditer(text)]
    assert found == []


def test_no_file_has_more_than_400_lines() -> None:
    """One that needs more has two subjects."""
    ours, kinds = (*OURS, "tests"), {".py", ".h", ".cpp", ".js", ".css", ".html"}
    files = [path for folder in ours for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    own = [path for path in files if not {"vendor", "node_modules"} & set(path.parts)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in own}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_no_weights_are_read_with_pickle() -> None:
    """torch.load and pickle run what a file tells them to."""
    wrong = []
    for module, path in MODULES.items():
        if within(module, "training"):  # reads its own checkpoints of the optimiser
            continue
        text = path.read_text(encoding="utf-8")
        # Parsing all files takes seconds.
        for node in ast.walk(ast.parse(text)) if "pickle" in text or "torch.load" in text else ():
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("load", "loads")
                and ast.unparse(node) in ("torch.load", "pickle.loads", "pickle.load")
            ):
                wrong.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def test_migrations_are_one_line() -> None:
    """Two that lead from the same version would leave a store at neither."""
    versions = ROOT / "serve_app" / "state" / "migrations" / "versions"
    found = []
    for path in sorted(versions.glob("v*.py")):
        known = dict(re.findall(r'^(revision|down_revision) = "?(\w+)"?$', path.read_text(), re.MULTILINE))
        assert path.name.startswith(f"v{known['revision']}_"), path.name
        found.append((known["down_revision"], known["revision"]))
    assert [before for before, _ in found] == ["None", *(revision for _, revision in found[:-1])]
    assert found[-1][1] == HEAD
