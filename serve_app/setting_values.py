"""How lists are written in settings, and where the keys of other clusters lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NEIGHBOUR = re.compile(r"([a-z0-9][a-z0-9-]{0,31})=(https?://[^/@\s]+(?:/\S*)?)")

_HERE = re.compile(r"=http://(127\.|localhost[:/]|localhost$|\[::1\])")


def comma_list(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(item.strip() for item in value if item.strip())
    return value


def numbers(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def neighbour_list(value: Any) -> Any:
    """``NAME=URL`` each, or a mapping of names to URLs."""
    if isinstance(value, dict):
        value = [f"{name}={url}" for name, url in value.items()]
    found = comma_list(value)
    names = []
    for item in found if isinstance(found, tuple) else ():
        match = _NEIGHBOUR.fullmatch(item)
        if match is None:
            raise ValueError(
                f"{item[:100]!r} is no neighbour | Write NAME=URL, such as paris=https://paris.example.com: a name of "
                "small letters, digits and -, and the root of that cluster's API, without a key."
            )
        names.append(match[1])
    if len(set(names)) < len(names):
        raise ValueError("two neighbours have one name | Give each its own.")
    return found


def in_the_clear(listed: tuple[str, ...]) -> list[str]:
    """Names of neighbours that are reached without TLS, and not on this machine."""
    plain = (item for item in listed if "=http://" in item and not _HERE.search(item))
    return [item.partition("=")[0] for item in plain]


def key_variable(name: str) -> str:
    """Where the environment has the key of a neighbour."""
    return f"SERVE_APP_NEIGHBOUR_KEY_{name.upper().replace('-', '_')}"


def key_file(home: Path, name: str) -> Path:
    """Where it lies otherwise."""
    return home / "neighbours" / f"{name}.key"


def neighbour_keys(listed: tuple[str, ...], home: Path, environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, URL and key of each; the key from the environment, else from a file that its owner alone may read. Raises
    ``ValueError``, which never has a key in it.
    """
    found = []
    for item in listed:
        name, _, url = item.partition("=")
        key, path = environ.get(key_variable(name), ""), key_file(home, name)
        if not key:
            try:
                if path.stat().st_mode & 0o077:
                    raise ValueError(f"{path} can be read by others than its owner. Run: chmod 600 {path}")
                key = path.read_text().strip()
            except OSError:
                key = ""
        if not key or any(not 33 <= ord(letter) <= 126 for letter in key):
            raise ValueError(f"neighbour {name} has no key. Set {key_variable(name)}, or write it to {path}.")
        found.append((name, url.rstrip("/"), key))
    return found
