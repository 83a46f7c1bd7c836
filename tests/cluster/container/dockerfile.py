"""A Dockerfile read as docker reads it: its instructions, and what `COPY` finds in the context.

Of https://docs.docker.com/reference/dockerfile/ what a file of one stage has; anything else is an error.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "CMD"}


@dataclass(frozen=True, slots=True)
class Step:
    """A `RUN` or a `COPY`, with the variables that it sees and the folder that it is in."""

    name: str
    words: str  # of RUN the shell's line; of COPY sources and target
    folder: str
    variables: Mapping[str, str]


@dataclass(slots=True)
class Recipe:
    """What a Dockerfile says, with its arguments filled in."""

    base: str = ""
    steps: list[Step] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def copied(self) -> list[str]:
        return [source for step in self.steps if step.name == "COPY" for source in step.words.split()[:-1]]

    @property
    def runs(self) -> list[str]:
        return [step.words for step in self.steps if step.name == "RUN"]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Names and what follows them. A comment is a whole line, also in the middle of an instruction."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for whole in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        name, _, rest = whole.strip().partition(" ")
        if name.upper() not in KNOWN or "<<" in rest or rest.lstrip().startswith("--"):
            raise ValueError(f"not read here: {whole}")
        yield name.upper(), rest.strip()


def filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], ""), text)


def read(text: str, base_environment: Mapping[str, str], **given: str) -> Recipe:
    """``given``: the values of `--build-arg`. ``base_environment``: what the image of `FROM` has."""
    made, outside, inside = Recipe(environment=dict(base_environment)), dict[str, str](), dict[str, str]()
    unused = set(given)
    for name, rest in instructions(text):
        if name == "ARG":
            key, _, default = rest.partition("=")
            (inside if made.base else outside)[key] = given.get(key, default)
            unused.discard(key)
            continue
        if name == "FROM":
            if made.base:
                raise ValueError("not read here: a second stage")
            made.base = filled(rest, outside)
            continue
        # An ENV comes before an ARG of its name.
        seen = {**inside, **made.environment}
        match name:
            case "RUN":
                made.steps.append(Step(name, rest, made.folder, seen))
            case "COPY":
                made.steps.append(Step(name, filled(rest, seen), made.folder, seen))
            case "WORKDIR":
                made.folder = str(Path(made.folder) / filled(rest, seen))
            case "ENV":
                pairs = [word.partition("=") for word in shlex.split(rest)]
                made.environment |= {key: filled(value, seen) for key, _, value in pairs}
            case "USER":
                made.user = filled(rest, seen)
            case "VOLUME":
                made.volumes += filled(rest, seen).split()
            case "EXPOSE":
                made.ports += map(int, filled(rest, seen).split())
            case "CMD":
                made.command = json.loads(rest)
    if unused:
        raise ValueError(f"no such build arguments: {sorted(unused)}")
    return made


class Ignored:
    """What a .dockerignore keeps out: the last line that fits decides, and who goes takes all beneath along."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [
            (not line.startswith("!"), re.compile(_pattern(line.lstrip("!").strip("/"))))
            for line in lines if line and not line.startswith("#")
        ]  # fmt: skip

    def __call__(self, path: str) -> bool:
        """``path``: from the context on."""
        out = False
        for keeps_out, pattern in self._rules:
            if pattern.fullmatch(path):
                out = keeps_out
        return out


def _pattern(line: str) -> str:
    parts = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    inner = re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda found: parts.get(found[0]) or re.escape(found[0]), line)
    return rf"{inner}(?:/.*)?"


def context(folder: Path, source: str) -> Iterator[Path]:
    """Files and links that `COPY` takes, from ``folder`` on: ``source`` itself, or all in it."""
    ignored = Ignored((folder / ".dockerignore").read_text())
    start = folder / source
    if not start.is_dir():
        yield start.relative_to(folder)
        return
    todo = [start]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            inner = path.relative_to(folder)
            if ignored(str(inner)):
                continue
            if path.is_dir() and not path.is_symlink():
                todo.append(path)
            else:
                yield inner
