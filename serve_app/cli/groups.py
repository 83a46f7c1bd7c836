"""What commands share: groups of actions, calls of a running server, and how results are printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from serve_app.client.server import Server, ServerError
from serve_app.config import Settings, load_settings
from serve_app.state.errors import Away, unreachable

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore

Command = Callable[[argparse.Namespace], int]


class Group:
    """``serve-app NAME ACTION``. ``about``: what its help says; the sentence that ``help`` makes by default."""

    def __init__(self, commands: Any, name: str, help: str, about: str = "") -> None:
        self._actions = add_command(commands, name, help, about).add_subparsers(required=True, metavar="ACTION")

    def action(self, name: str, help: str, command: Command, *, json: bool = False) -> argparse.ArgumentParser:
        """``json``: whether it takes ``--json``."""
        parser = add_command(self._actions, name, help)
        if json:
            parser.add_argument("--json", action="store_true", help="as JSON")
        parser.set_defaults(command=command)
        return parser


def add_command(commands: Any, name: str, help: str, about: str = "") -> argparse.ArgumentParser:
    """A parser whose description is ``about``, with its lines as they are."""
    shape = argparse.RawDescriptionHelpFormatter
    said = about or help[0].upper() + help[1:] + "."
    return commands.add_parser(name, help=help, description=said.replace("%%", "%"), formatter_class=shape)


def served(command: Callable[[argparse.Namespace, Server], int]) -> Command:
    """``command`` with the running server. What the server refuses, or a file that cannot be read, ends it with
    status 1.
    """

    def run(arguments: argparse.Namespace) -> int:
        try:
            with Server.connect() as server:
                return command(arguments, server)
        except BrokenPipeError:
            raise
        except (ServerError, OSError, UnicodeDecodeError) as error:
            print(f"serve-app: {error}", file=sys.stderr)
            return 1

    return run


@contextmanager
def open_store(settings: Settings | None = None, *, ready: bool = True) -> Iterator[SqlStore]:
    """The store itself, whether or not a server runs; ``ready``: with this program's schema. A database that cannot be
    reached is a :class:`StateError` here: somebody waits for it.
    """
    from serve_app.state.store.sql import SqlStore

    settings = settings or load_settings()
    with SqlStore(settings.home, settings.database) as store:
        try:
            if ready:
                store.open()
            yield store
        except Away as away:
            raise unreachable(away) from None


def show(found: Any, as_json: bool, said: str) -> int:
    """Prints ``found`` as JSON, or what is ``said`` of it."""
    print(json.dumps(found, indent=2) if as_json else said)
    return 0


def can_show(text: str) -> bool:
    """Whether the standard output has the characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
