"""The next release beside this one: its messages have more fields and its schema has more tables. Both are upgraded and
taken back one by one while streams run, and no stream notices.
"""

from __future__ import annotations

import ast
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.processes import descendants, name_of
from serve_app.state.migrations import HEAD
from tests.cluster.ray_start import ROOT, Cluster, asking, first_answer
from tests.waiting import wait_for

NEXT = f"{int(HEAD) + 1:04}"
# Of requests, answers, tokens, load reports and what gateways and workers tell each other.
CHANGED = {
    "generate.py": ("GenerateCall", "Generated", "Prefilled", "Missing"),
    "load.py": ("LoadReport",),
    "replicas.py": ("Subscribe", "Subscribed", "Listen", "Counters"),
    "tokens.py": ("TokenItem", "Tokens", "Hello", "Ended"),
    "turns.py": ("Enter", "Turned"),
}
MIGRATION = f'''"""What only the next release has."""

import sqlalchemy as sa
from alembic import op

revision = "{NEXT}"
down_revision = "{HEAD}"


def upgrade() -> None:
    op.add_column("accounts", sa.Column("later", sa.String, nullable=False, server_default="x"))
    op.create_table("later", sa.Column("id", sa.String, primary_key=True))
'''


def next_release(folder: Path) -> Path:
    """This checkout with the changes that a release may make."""
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name in ("serve_app", "deployments"):
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for name, classes in CHANGED.items():
        path = folder / "serve_app" / "wire" / name
        add_fields(path, classes)
    state = folder / "serve_app" / "state"
    replace(state / "migrations" / "__init__.py", f'HEAD = "{HEAD}"', f'HEAD = "{NEXT}"')
    replace(
        state / "migrations" / "__init__.py", "SERVES: tuple[str, ...] = (", f'SERVES: tuple[str, ...] = ("{HEAD}", '
    )
    (state / "migrations" / "versions" / f"v{NEXT}_later.py").write_text(MIGRATION)
    tables = state / "store" / "tables.py"
    replace(
        tables, 'Column("weight", Double, nullable=False),',
        'Column("weight", Double, nullable=False),\n    Column("later", String, nullable=False, server_default="x"),',
    )  # fmt: skip
    tables.write_text(
        tables.read_text() + '\nlater = Table("later", metadata, Column("id", String, primary_key=True))\n'
    )
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, (path, old)
    path.write_text(text.replace(old, new, 1))


def add_fields(path: Path, classes: tuple[str, ...]) -> None:
    lines, found = path.read_text().splitlines(), {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            found[node.name] = fields[-1].end_lineno
    assert set(found) == set(classes)
    for end in sorted((end for end in found.values() if end), reverse=True):
        lines.insert(end, '    later: str = "a field of the next release"')
    path.write_text("\n".join(lines) + "\n")


def running(cluster: Cluster, application: str) -> set[str]:
    """The folders whose project the replicas of an application run."""
    found = set()
    for pid in descendants(cluster.node.pid):
        with suppress(OSError):  # it has just ended
            if name_of(pid).startswith(f"ray::ServeReplica:{application}:"):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                environ = dict(os.fsdecode(word).partition("=")[::2] for word in words)
                found.add(environ["PYTHONPATH"].split(os.pathsep)[0])
    return found


def schema(home: Path) -> str:
    with closing(sqlite3.connect(home / "state.sqlite3")) as db:
        return db.execute("SELECT version_num FROM alembic_version").fetchone()[0]


@pytest.mark.slow
def test_a_release_comes_and_goes_beside_streams_of_the_other(folder: Path) -> None:
    old, new = str(ROOT), str(next_release(folder / "next"))
    cluster = Cluster(folder)

    def run(gateway: str, models: str) -> Callable[[dict[str, Any]], None]:
        def change(config: dict[str, Any]) -> None:
            for application in config["applications"]:
                code = gateway if application["name"] == "gateway" else models
                application.setdefault("runtime_env", {"env_vars": {}})["env_vars"]["PYTHONPATH"] = code

        return change

    cluster.deploy(run(old, old))
    text = wait_for(lambda: first_answer(cluster), 600)
    assert text and schema(folder / "home") == HEAD
    with asking(cluster, 3) as got:
        for gateway, models in ((old, new), (new, new), (new, old), (old, old)):
            told = len(got)
            cluster.deploy(run(gateway, models))
            wait_for(
                lambda gateway=gateway, models=models: (
                    running(cluster, "gateway") == {gateway} and running(cluster, "cf--pico--pico-instruct") == {models}
                ),
                600,
            )
            wait_for(lambda told=told: len(got) >= told + 12, 300)
            assert set(got) == {text}, (gateway, models)
            assert schema(folder / "home") == (HEAD if (gateway, models) == (old, new) else NEXT)
    assert schema(folder / "home") == NEXT  # and this release uses it
