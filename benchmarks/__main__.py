"""``python -m benchmarks NAME ...``: runs one benchmark; also reached as ``serve-app bench NAME``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_HIDDEN = {"__init__", "__main__"}


def names() -> list[str]:
    """Modules and packages of this folder with a ``main``."""
    here = Path(__file__).parent
    found = [(p.stem, p) for p in here.glob("*.py")] + [(p.parent.name, p) for p in here.glob("*/__init__.py")]
    return sorted(name for name, path in found if name not in _HIDDEN and "\ndef main(" in path.read_text())


def run(arguments: list[str]) -> int:
    known = names()
    if not arguments or arguments[0] not in known:
        print(f"usage: python -m benchmarks {{{','.join(known)}}} [options]; NAME --help explains one")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    sys.argv = [f"benchmarks {arguments[0]}", *arguments[1:]]
    return importlib.import_module(f"benchmarks.{arguments[0]}").main() or 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
