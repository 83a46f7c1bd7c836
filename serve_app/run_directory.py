"""The folder of one running server: private to its user, and gone with it, however it ends.

Sockets, configuration and logs of Ray and HAProxy lie here, not where every local user can replace them. A keeper, a
shell of a megabyte, waits for the end of the process that made the folder. It then ends what was left running and
removes the folder: after ``kill -9`` no HAProxy keeps the port.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

PREFIX = "serve-app-"
KEEPER = Path(__file__).with_name("keeper.sh")
# A socket's path has at most 107 bytes (Linux, sun_path); Ray and HAProxy add up to 79 to the folder's.
MAX_PATH = 28
# From asking processes to end until they are ended, and until that is given up: whoever watches wants to start anew.
ASKED_S, END_S = 2.0, 5.0


class RunDirectory:
    """``path`` is 0700. The lock file in it is held while the server runs: what is not locked was left behind."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 - held for as long as the server runs
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "haproxy").mkdir(mode=0o700)
        self._keeper = subprocess.Popen(
            ["/bin/sh", str(KEEPER)],
            env={"PATH": os.environ.get("PATH", os.defpath), "FOLDER": str(self.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

    @property
    def ray(self) -> Path:
        """Where Ray keeps its sessions."""
        return self.path / "ray"

    @property
    def haproxy(self) -> Path:
        return self.path / "haproxy"

    def close(self) -> None:
        """Ends what still runs in the folder, removes it, and lets the keeper go."""
        end_processes(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()


def remove_leftovers() -> list[Path]:
    """Removes folders of servers that have ended without doing so, and ends what still runs in them."""
    removed = []
    for folder in _place().glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the server runs
                end_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def processes_in(folder: Path) -> list[int]:
    """This user's processes whose command line names the folder: Ray's daemons, HAProxy, launchers. Ray's processes
    with a title of their own (``ray::DashboardAgent``) name it in their environment only.
    """
    wanted, found = os.fsencode(folder), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            said = (entry / "cmdline").read_bytes()
            if said.startswith(b"ray::"):
                said = (entry / "environ").read_bytes()
            if wanted + b"/" in said:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def end_processes(folder: Path) -> None:
    """Asks them to end, and ends those that have not after some seconds: also one that no longer names the folder by
    then, because it is ending or has become something else.
    """
    known: set[tuple[int, str]] = set()
    for number, seconds in ((signal.SIGTERM, ASKED_S), (signal.SIGKILL, END_S)):
        until, told = time.monotonic() + seconds, set[tuple[int, str]]()
        while True:
            known.update((pid, began) for pid in processes_in(folder) if (began := _began(pid)) is not None)
            known = {(pid, began) for pid, began in known if _began(pid) == began}
            if not known or time.monotonic() > until:
                break
            for pid, _ in known - told:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            told |= known
            time.sleep(0.05)


def _began(pid: int) -> str | None:
    """When a living process was started, in the kernel's ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _place() -> Path:
    """The usual folder for temporary files, unless its name is too long for sockets below it."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) + 1 + len(PREFIX) + 8 <= MAX_PATH else Path("/tmp")
