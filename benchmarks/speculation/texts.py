"""Workloads of the speculation benchmark: prompts, and answers where they are given rather than generated."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import ROOT
from serve_app.text.chat_template import ChatTemplate

MODULES = (
    "bisect", "heapq", "textwrap", "shlex", "fnmatch", "string", "queue", "sched", "keyword", "glob", "colorsys",
    "copy", "stat", "calendar", "csv", "getopt", "gettext", "graphlib", "hmac", "linecache", "netrc", "numbers",
    "opcode", "pprint", "quopri", "random", "reprlib", "secrets", "shelve", "timeit", "symtable", "tabnanny",
)  # fmt: skip
CITIES = """
    Paris London Tokyo Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Athens Cairo Delhi Beijing Seoul Sydney
    Toronto Chicago Boston Denver Miami Lima Bogota Nairobi Lagos Tunis Kyoto Osaka Milan Naples Turin Zurich Geneva
    Basel Lyon Nice Lille Porto Sofia Riga Vilnius Tallinn Helsinki Bergen Malmo Aarhus Krakow Gdansk Hamburg
    Munich Dresden Leipzig Bonn Ghent Bruges Antwerp Utrecht Leiden Delft Cork Leeds York Bath
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(slots=True)
class Case:
    """A prompt, and the answer if it is given: the model then computes every token, but what it says is laid down."""

    prompt: list[int]
    answer: list[int] | None = None


@dataclass(slots=True)
class Texts:
    """Cases of each workload by name; ``folder`` holds a tokenizer, and its chat template if there is one."""

    folder: Path
    answer_tokens: int

    def workloads(self, real: bool) -> dict[str, Callable[[int], list[Case]]]:
        """Name -> cases for a batch size. ``real``: also those that need a model that has learnt something."""
        given = {"edit": self.edits, "table": self.tables, "prose": self.prose}
        answered = {"tools": self.tools, "questions": self.questions, "code": self.code}
        return {**(answered if real else {"loop": self.loops}), **given}

    @property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self.folder)

    def chat(self, text: str, tools: list[dict] | None = None) -> list[int]:
        template = _template(self.folder)
        if template is None:
            return self.tokenizer.encode(text).ids
        rendered = template.render([{"role": "user", "content": text}], tools)
        return self.tokenizer.encode(rendered, add_special_tokens=False).ids

    # -- what the model itself answers ---------------------------------------------------------------------------------

    def tools(self, count: int) -> list[Case]:
        """A tool call as JSON."""
        return [Case(self.chat(f"What is the weather in {CITIES.split()[i]}?", [WEATHER])) for i in range(count)]

    def questions(self, count: int) -> list[Case]:
        """What functions of the standard library do."""
        listed = json.loads((ROOT / "training" / "questions.json").read_text())["questions"]
        return [Case(self.chat(listed[i % len(listed)]["question"])) for i in range(count)]

    def code(self, count: int) -> list[Case]:
        """The standard library's own source, to be continued after some 200 tokens."""
        return [Case(self.tokenizer.encode(source(i)).ids[:200]) for i in range(count)]

    def loops(self, count: int) -> list[Case]:
        """Anything: a model with random weights soon repeats itself, which look-up finds trivially."""
        return [Case([(7 * i + 13 * j) % 6000 + 10 for j in range(64)]) for i in range(count)]

    # -- given answers -------------------------------------------------------------------------------------------------

    def edits(self, count: int) -> list[Case]:
        """A part of a file and an instruction; the answer is that part with a name changed and a line added."""
        cases = []
        for index in range(count):
            text = source(index)[:1500]
            name = most_used_name(text)
            edited = re.sub(rf"\b{name}\b", f"{name}_2", text)
            half = edited.find("\n", len(edited) // 2) + 1
            edited = edited[:half] + f"# TODO: check {name}_2\n" + edited[half:]
            cases.append(self._given(f"Rename {name} to {name}_2 in this file:\n{text}\n", edited))
        return cases

    def tables(self, count: int) -> list[Case]:
        """Repetitive text: a log of which only numbers change."""
        cases = []
        for i in range(count):
            rows = [f"2026-11-21 10:{n // 60:02}:{n % 60:02} INFO worker-{i} step {n * 37 % 101} done\n"
                    for n in range(40)]  # fmt: skip
            cases.append(self._given("Continue the log:\n" + "".join(rows[:3]), "".join(rows[3:])))
        return cases

    def prose(self, count: int) -> list[Case]:
        """Text that repeats little: docstrings, which the prompt does not contain."""
        words = "".join(re.findall(r'"""(.*?)"""', "".join(source(i) for i in range(len(MODULES))), re.S)).split()
        size = 3 * self.answer_tokens
        return [
            self._given("Write documentation.\n", " ".join(words[(i * size) % (len(words) - size) :][:size]))
            for i in range(count)
        ]

    def _given(self, prompt: str, answer: str) -> Case:
        return Case(
            self.chat(prompt), self.tokenizer.encode(answer, add_special_tokens=False).ids[: self.answer_tokens]
        )


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def _template(folder: Path) -> ChatTemplate | None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template" not in config:
        return None
    special = {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
    return ChatTemplate(config["chat_template"], special)


def source(index: int) -> str:
    """A module of the standard library; on later rounds from further below."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = (folder / f"{MODULES[index % len(MODULES)]}.py").read_text(encoding="utf-8")
    return text[index // len(MODULES) * len(text) // 3 :]


def most_used_name(text: str) -> str:
    """A word of four letters or more, for renaming."""
    names = re.findall(r"\b[A-Za-z_]{4,}\b", text)
    return max(set(names), key=lambda name: (names.count(name), name))
