"""``python -m benchmarks NAME ...``: runs one benchmark; also reached as ``serve-app bench NAME``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commands() -> dict[str, str]:
    """Module by name, for each module and package with a ``main`` below this folder. A package goes by its own name."""
    found = {}
    for path in HERE.rglob("*.py"):
        if path.name == "__main__.py" or "\ndef main(" not in path.read_text():
            continue
        parts = path.relative_to(HERE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[parts[-1]] = ".".join(("benchmarks", *parts))
    return dict(sorted(found.items()))


def run(arguments: list[str]) -> int:
    known = commands()
    if not arguments or arguments[0] not in known:
        print(f"usage: python -m benchmarks {{{','.join(known)}}} [options]; NAME --help explains one")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    sys.argv = [f"benchmarks {arguments[0]}", *arguments[1:]]
    return importlib.import_module(known[arguments[0]]).main() or 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
