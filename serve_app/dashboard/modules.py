"""Which of the page's modules a browser should fetch at once, instead of finding each in the one that imports it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

MAIN = "js/main.js"
# Those that the frame fetches when a page is opened, by the page's name.
PAGES = re.compile(r"js/pages/(\w+)\.js")
# What a module imports before it runs; `import("...")` is fetched when it is called, and not found.
_AT_ONCE = re.compile(rb'(?m)^(?:import|export)\b[^;=]*?from "([^"]+)"|^import "([^"]+)"')


def needed(name: str, bodies: Mapping[str, bytes]) -> list[str]:
    """A module and all that it needs before it runs, nearest first."""
    found = [name]
    for module in found:  # grows while it is walked
        for pair in _AT_ONCE.findall(bodies.get(module, b"")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(module), (pair[0] or pair[1]).decode()))
            if path in bodies and path not in found:
                found.append(path)
    return found


def by_page(bodies: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Modules of each page by its name, and under "" those that every page needs, which the others leave out."""
    frame = needed(MAIN, bodies)
    pages = {match[1]: name for name in bodies if (match := PAGES.fullmatch(name))}
    return {"": frame} | {page: [n for n in needed(name, bodies) if n not in frame] for page, name in pages.items()}
