"""Scripts of shells, by the shells themselves where they are."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from serve_app.cli.completion import SHELLS, script
from serve_app.cli.program import parser

ASK_BASH = """
serve-app() { echo @cf/me/one @cf/me/two; }
words=(%s); COMP_WORDS=("${words[@]}"); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
$(complete -p serve-app | sed 's/.*-F \\([^ ]*\\) .*/\\1/') serve-app "${words[-1]}" "${words[-2]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_the_script(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run([shell, "-n"], input=script(parser(), shell), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("serve-app st", "status"),
        ("serve-app batch w", "watch"),
        ("serve-app models sc", "scale"),
        ("serve-app models start @cf/me/t", "@cf/me/two"),
        ("serve-app usage --by mod", "model"),
        ("serve-app run @cf/me/t", "@cf/me/two"),
        ("serve-app run --sy", "--system"),
    ],
)
def test_bash_completes(line, found):
    asked = script(parser(), "bash") + ASK_BASH % " ".join(f"'{word}'" for word in line.split())
    done = subprocess.run(["bash"], input=asked, capture_output=True, text=True)
    assert done.stdout.strip() == found, done.stderr
