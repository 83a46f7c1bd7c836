"""Prompt templates: files of the operator, read when they are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.catalog.prompts import BrokenPrompt, Prompts

GOOD = """
default: 2
accounts: [team-a]
versions:
  1: {instructions: "You answer for {{company}}."}
  "2":
    instructions: In {{language}}.
    messages: [{role: user, content: "I am {{name}}."}]
    defaults: {model: "@cf/pico/pico-instruct", temperature: 0}
  "3": {instructions: Newer.}
"""


def write(home: Path, text: str, name: str = "support") -> Path:
    (home / "prompts").mkdir(exist_ok=True)
    path = home / "prompts" / f"{name}.yaml"
    path.write_text(text)
    return path


def test_versions_and_accounts(tmp_path):
    prompts = Prompts(tmp_path)
    assert prompts.find("support", None, "team-a") is None
    write(tmp_path, GOOD)
    name, found = prompts.find("support", None, "team-a")
    assert name == "2" and found.instructions == "In {{language}}." and found.defaults["temperature"] == 0
    assert prompts.find("support", "1", "team-a")[1].instructions == "You answer for {{company}}."
    assert prompts.find("support", "9", "team-a") is None
    assert prompts.find("support", None, "team-b") is None
    assert prompts.find("other", None, "team-a") is None


def test_a_changed_file_is_read_again(tmp_path):
    prompts = Prompts(tmp_path)
    path = write(tmp_path, "versions: {a: {instructions: One.}, b: {instructions: Two.}}")
    # The last one, unless the file says otherwise; and everybody may use it.
    assert prompts.find("support", None, "anybody")[0] == "b"
    path.write_text("versions: {a: {instructions: Other.}}")
    os.utime(path, ns=(1, 1))
    assert prompts.find("support", None, "anybody")[1].instructions == "Other."
    path.unlink()
    assert prompts.find("support", None, "anybody") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "dictionary"),
        ("[", "line|parsing|expected"),
        ("versions: {}", "versions"),
        ("versions: {a: {}}", "neither instructions nor messages"),
        ("versions: {a: {instructions: 5}}", "versions.a.instructions"),
        ("versions: {a: {messages: [{role: tool, content: x}]}}", "role"),
        ("versions: {a: {instructions: x, other: y}}", "other"),
        ("versions: {a: {instructions: x, defaults: {input: y}}}", "defaults must not hold input"),
        ("default: b\nversions: {a: {instructions: x}}", "default names version b"),
        ("!!python/object/apply:os.system [x]", "constructor"),
        ("versions: {a: {instructions: '" + "x" * (1 << 20) + "'}}", "bytes"),
    ],
)
def test_a_broken_file_says_why(tmp_path, text, words):
    write(tmp_path, text)
    with pytest.raises(BrokenPrompt, match=words):
        Prompts(tmp_path).find("support", None, "a")
