"""The examples of docs/api.md, run as they stand there."""

from __future__ import annotations

import re

import pytest

from serve_app.catalog.load import PROJECT_ROOT
from tests.conftest import ACCOUNT

SECTION = (PROJECT_ROOT / "docs" / "api.md").read_text().split("## Examples")[1].split("\n## ")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda source: source.split()[1])
def test_examples(stack, capsys, example):
    exec(compile(example, "docs/api.md", "exec"), {"URL": stack.url, "KEY": stack.key, "ACCOUNT": ACCOUNT})
    shown = capsys.readouterr().out
    assert len(shown) > 20


def test_there_are_some():
    assert len(EXAMPLES) >= 4
