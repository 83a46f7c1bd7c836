"""An image, built as the Dockerfile says where there is no docker: its lines are run by a shell in a root of their own,
and its files are copied as docker copies them.

What differs: the base image is this machine's /usr and Python, and the programs that fetch (`apt-get`, `pip`, `uv`) are
stand-ins without a network. `apt-get` looks whether this machine has the program; `uv` copies packages (``uv.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.container import dockerfile
from tests.cluster.container.dockerfile import Recipe, Step

HERE = Path(__file__).parent
ENTER = HERE / "enter.sh"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS = 1800
APT = """#!/bin/sh
for word; do case "$word" in
  -*|update|install) ;;
  *) command -v "$word" >/dev/null || { echo "this machine has no $word" >&2; exit 1; } ;;
esac; done
"""
PIP = """#!/bin/sh
for word; do case "$word" in -*|install|uv==*) ;; *) echo "not known here: $word" >&2; exit 1 ;; esac; done
"""
UV = '#!/bin/sh\nexec /usr/local/bin/python3 -I -S -B /shim/uv.py "$@"\n'


@dataclass(frozen=True, slots=True)
class Image:
    root: Path
    recipe: Recipe

    @property
    def mounts(self) -> list[tuple[Path, str]]:
        """What stands for the base image: read only, whoever asks."""
        return [(Path("/usr"), "/usr"), (Path(sys.base_prefix), "/usr/local")]

    def command(self, mode: str, mounts: list[tuple[Path, str, str]], program: list[str]) -> list[str]:
        """How to run a program in the image, as the first process of namespaces of its own."""
        below = Path(tempfile.mkdtemp(prefix="root-", dir=self.root.parent)) / "root"
        below.mkdir()
        words: list[str] = []
        for source, target, how in [*((source, target, "ro") for source, target in self.mounts), *mounts]:
            words += [str(source), target, how]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        return [*spaces, "bash", str(ENTER), str(self.root), str(below), mode, *words, "--", *program]


def build(context: Path, folder: Path, **arguments: str) -> Image:
    """``folder``: an empty one on a disk, for some gigabytes."""
    recipe = dockerfile.read((context / "Dockerfile").read_text(), {"PATH": PATH}, **arguments)
    made = Image(folder / "image", recipe)
    _base(made.root)
    _programs(folder / "shim")
    # Python's own library is found where it lies in the image.
    _run(made, Step("RUN", "ldconfig", "/", {"PATH": PATH}), folder / "shim")
    for step in recipe.steps:
        inside = made.root / step.folder.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        if step.name == "COPY":
            _copy(context, inside, step.words)
        else:
            _run(made, step, folder / "shim")
    return made


def _base(root: Path) -> None:
    """Folders and links of a Debian, and of /etc what programs read."""
    for name in ("usr", "etc", "var/lib/apt/lists", "var/tmp", "tmp", "root", "run", "srv", "proc", "sys", "dev/shm"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("alternatives", "ld.so.conf", "ld.so.conf.d", "ssl", "login.defs", "nsswitch.conf"):
        source, target = Path("/etc", name), root / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copy2(source, target)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for name in ("shadow", "gshadow"):
        (root / "etc" / name).write_text("root:*:::::::\n" if name == "shadow" else "root:*::\n")


def _programs(folder: Path) -> None:
    (folder / "borrowed").mkdir(parents=True)
    (folder / "environment").mkdir()
    packages = Path(next(path for path in sys.path if path.endswith("site-packages"))).relative_to(sys.prefix)
    (folder / "borrowed" / "pip").symlink_to(Path("/shim/environment") / packages / "pip")
    for name, text in {"apt-get": APT, "pip": PIP, "uv": UV}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(HERE / "uv.py", folder)


def _copy(context: Path, inside: Path, words: str) -> None:
    *sources, target = words.split()
    for source in sources:
        whole = (context / source).is_dir()
        for path in dockerfile.context(context, source):
            to = inside / target / (path.relative_to(source) if whole else path.name)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(context / path, to, follow_symlinks=False)


def _run(image: Image, step: Step, shim: Path) -> None:
    mounts = [(shim, "/shim", "ro"), (Path(sys.prefix), "/shim/environment", "ro")]
    variables = {**step.variables, "PATH": f"/shim:{step.variables['PATH']}", "WORKDIR": step.folder}
    program = image.command("rw", mounts, ["/bin/sh", "-c", step.words])
    done = subprocess.run(
        program, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-6000:]
        raise RuntimeError(f"RUN {step.words[:200]} ended with {done.returncode}: {said}")


def owned_by(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_uid, found.st_mode & 0o7777
