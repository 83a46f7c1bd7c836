"""`uv` for a build without a network: takes packages from the environment of the tests, each in the version that is
locked, and only those that the named files have. Run by the image's Python; an option that is not known ends the build.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = {"--no-cache", "--require-hashes", "--no-build-isolation", "--no-deps", "--compile-bytecode"}


def main(words: list[str]) -> None:
    if words[0] == "venv":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *words[1:]], check=True)
        return
    assert words[:2] == ["pip", "install"], words
    flags, files, editable, rest = set(), [], None, words[2:]
    while rest:
        word = rest.pop(0)
        if word == "-r":
            files.append(Path(rest.pop(0)))
        elif word == "--editable":
            editable = rest.pop(0)
        else:
            assert word in FLAGS or word.startswith("--torch-backend="), f"not known here: {word}"
            flags.add(word)
    if editable:
        # With its own setuptools, as said; pip alone is borrowed.
        command = [".venv/bin/python", "-m", "pip", "install", "--no-index", "--no-cache-dir", "--no-build-isolation"]
        borrowed = {**os.environ, "PYTHONPATH": "/shim/borrowed"}
        subprocess.run([*command, "--no-deps", "--editable", editable], check=True, env=borrowed)
        return
    pins = [pin for file in files for pin in pinned(file.read_text(), "--require-hashes" in flags)]
    packages = [str(path) for path in Path("/shim/environment/lib").glob("python3*/site-packages")]
    there = {norm(one.name): one for one in importlib.metadata.distributions(path=packages)}
    for name, version in pins:
        found = there.get(norm(name))
        if found is None or found.version.partition("+")[0] != version:
            raise SystemExit(f"{name}=={version} is locked; the tests have {found and found.version}: make install-dev")
        take(found, "--compile-bytecode" in flags)


def norm(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str, hashed: bool) -> list[tuple[str, str]]:
    found = []
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text)[1:]:
        pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", block)
        assert pin and ("--hash=sha256:" in block or not hashed), block
        found.append((pin[1], pin[2]))
    return found


def take(one: importlib.metadata.Distribution, compiled: bool) -> None:
    """Files of a package, its programs with this environment's Python. Their times stay, by which bytecode is known."""
    [site] = Path(".venv/lib").glob("python3*/site-packages")
    for file in one.files or ():
        source, target = Path(str(one.locate_file(file))), site / file
        if "__pycache__" in file.parts or not source.is_file():
            continue
        if file.parts[0] == "..":
            target = Path(".venv/bin") / file.name
            if "bin" not in file.parts:
                continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        if target.parent == Path(".venv/bin"):
            text = target.read_bytes()
            if text.startswith(b"#!") and b"python" in text.partition(b"\n")[0]:
                target.write_bytes(f"#!{Path('.venv/bin/python').absolute()}\n".encode() + text.partition(b"\n")[2])
        elif compiled and file.suffix == ".py":
            name = Path("__pycache__") / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            if (source.parent / name).is_file():
                (target.parent / "__pycache__").mkdir(exist_ok=True)
                shutil.copy2(source.parent / name, target.parent / name)


if __name__ == "__main__":
    main(sys.argv[1:])
