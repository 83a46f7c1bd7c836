"""``serve-app completion``: a script by which a shell completes commands, options, files and models."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serve_app.cli.groups import add_command

SHELLS = ("bash", "zsh", "fish")
_ABOUT = """\
Prints a script that completes serve-app's commands, options, files and models in a shell.

  bash   serve-app completion bash > ~/.local/share/bash-completion/completions/serve-app
  zsh    serve-app completion zsh > "${fpath[1]}/_serve-app"
  fish   serve-app completion fish > ~/.config/fish/completions/serve-app.fish

or for this shell only: eval "$(serve-app completion bash)"
"""
# bash takes @ for the end of a word, and ids of models begin with it.
_PREAMBLE = {"bash": "COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}"}


def add_parser(commands: Any, program: Callable[[], argparse.ArgumentParser]) -> None:
    """``program``: the whole program's parser."""
    completion = add_command(commands, "completion", "print a shell's completion script", _ABOUT)
    completion.add_argument("shell", choices=SHELLS, help="the shell")

    def run(arguments: argparse.Namespace) -> int:
        print(script(program(), arguments.shell))
        return 0

    completion.set_defaults(command=run)


def script(program: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``shell``."""
    import shtab

    for action in _actions(program):
        if action.dest in ("model", "models") and not action.choices:
            action.complete = shtab.cmd("serve-app models --ids 2>/dev/null")  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(program, shell=shell, preamble=_PREAMBLE)  # type: ignore[arg-type]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of all commands below as well."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action
