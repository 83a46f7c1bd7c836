"""Machines on one machine: each has its own network, address, processes, disk, /tmp and shared memory, and hangs by a
cable of its own on a switch. Nothing that runs in one reaches another but through the cable.

They are namespaces of Linux, so they need root. What is not as on machines of their own: kernel, cores and clock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

BOOT = Path(__file__).with_name("boot.sh")
GIB = 1 << 30


def _ip(*words: object) -> str:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


@lru_cache
def why_not() -> str | None:
    """Why there can be no machines here; None where there can."""
    for program in ("ip", "tc", "unshare", "nsenter", "setpriv", "pivot_root"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if os.geteuid():
        return "only root makes network namespaces"
    try:
        with network() as switch:
            switch.machine("trial").run("true")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"a machine of namespaces did not start: {error}"
    return None


@dataclass
class Machine:
    """One of them, running. ``cable`` is the end at the switch, so what it receives is what the machine sends."""

    name: str
    address: str
    cable: str
    init: int  # its first process, as this machine counts
    _holder: subprocess.Popen[str]
    _disk: Path

    def command(self, *words: object) -> list[str]:
        """How to run a program in it from here."""
        return ["nsenter", "--target", str(self.init), "--all", "--root", "--wdns=/", *map(str, words)]

    def run(self, *words: object, seconds: float = 120, env: Mapping[str, str] | None = None) -> str:
        """What a program says that ends well; what it says elsewhere otherwise, as an error."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, env=env
        )
        if done.returncode:
            said = (done.stdout + done.stderr).strip()[-8000:]
            raise RuntimeError(f"{' '.join(map(str, words))} on {self.name} ended with {done.returncode}: {said}")
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """A file of its own, which only its owner can read."""
        into = 'umask 077 && mkdir -p "$(dirname "$1")" && cat > "$1"'
        done = subprocess.run(self.command("bash", "-c", into, "write", path), input=text, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{path} could not be written on {self.name}")

    def start(self, *words: object, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A program that goes on; it ends with the machine at the latest."""
        with open(log, "ab") as stream:
            return subprocess.Popen(
                self.command(*words), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=env
            )

    @property
    def running(self) -> bool:
        return self._holder.poll() is None

    def sent(self) -> int:
        """Bytes that have left it through its cable, headers included."""
        return self._counted("rx_bytes")

    def received(self) -> int:
        return self._counted("tx_bytes")

    def _counted(self, name: str) -> int:
        return int(Path(f"/sys/class/net/{self.cable}/statistics/{name}").read_text())

    def limit(self, rate: str | None) -> None:
        """The cable carries so much in each direction ("20mbit"); None: what it can."""
        at_the_machine = self.command("tc")
        for tc, device in ((["tc"], self.cable), (at_the_machine, "eth0")):
            subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], capture_output=True)
            if rate is not None:
                shaping = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
                subprocess.run([*tc, "qdisc", "add", "dev", device, "root", *shaping], check=True)

    def unplug(self) -> None:
        """Nothing comes or goes any more, and nobody is told."""
        _ip("link", "set", self.cable, "nomaster")

    def plug(self, switch: str) -> None:
        _ip("link", "set", self.cable, "master", switch)

    def lose(self) -> None:
        """As if the power were cut: the others hear nothing, not even that connections end."""
        self.unplug()
        self.stop()

    def restart(self) -> None:
        """Ends what runs in it, and empties its memory and its /tmp; its disk stays."""
        self.run("bash", "-c", "kill -9 -1; rm -rf /tmp/* /dev/shm/*")

    def stop(self) -> None:
        """Ends everything in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._holder.wait(60)
        shutil.rmtree(self._disk, ignore_errors=True)


@dataclass
class Network:
    """The switch and what hangs on it. This machine does as well, at ``address``."""

    switch: str
    prefix: str
    folder: Path
    machines: list[Machine] = field(default_factory=list)
    _next: int = 10

    @property
    def address(self) -> str:
        return f"{self.prefix}.1"

    def machine(self, name: str, *, shared_memory: int = GIB, instead: Machine | None = None) -> Machine:
        """``instead``: of one that has ended, whose address it gets."""
        number, self._next = self._next, self._next + 1
        disk, cable, address = self.folder / f"disk-{number}", f"{self.switch}-{number}", f"{self.prefix}.{number}"
        if instead is not None:
            address = instead.address
        disk.mkdir()
        kinds = ["--net", "--mount", "--pid", "--ipc", "--uts"]
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child=KILL"]
            + ["bash", str(BOOT), str(disk), name, str(shared_memory), address],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert holder.stdout is not None
        said = holder.stdout.readline()
        if said.strip() != "up":
            holder.kill()
            raise RuntimeError(f"{name} did not start: {said}{holder.stdout.read()}")
        [init] = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        made = Machine(name, address, cable, int(init), holder, disk)
        self.machines.append(made)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", init)
        made.plug(self.switch)
        _ip("link", "set", cable, "up")
        made.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        made.run("ip", "link", "set", "eth0", "up")
        # Ray finds its own address by the way to the world. There is none: nobody answers.
        made.run("ip", "route", "add", "default", "dev", "eth0")
        return made

    def named(self, name: str) -> Machine:
        [found] = [one for one in self.machines if one.name == name and one.running]
        return found


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A switch; when the block ends, whatever happens, all machines on it end and nothing of them is left."""
    _sweep()
    number = os.getpid() % 60_000
    # Of the addresses for measuring networks (RFC 2544), which nobody has.
    prefix, switch = f"198.{18 + number // 30_000}.{number % 250 + 1}", f"sa{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="machines-"))
    made = Network(switch, prefix, folder)
    try:
        _ip("link", "add", switch, "type", "bridge")
        _ip("address", "add", f"{made.address}/24", "dev", switch)
        _ip("link", "set", switch, "up")
        yield made
    finally:
        for machine in made.machines:
            machine.stop()
        _delete(switch)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Switches whose process was killed; its machines went with it."""
    for path in Path("/sys/class/net").glob("sa*"):
        pid = path.name[2:]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _delete(path.name)


def _delete(switch: str) -> None:
    # A machine's cable goes with its network namespace, for which the kernel takes a moment.
    end = time.monotonic() + 10
    while any(Path("/sys/class/net").glob(f"{switch}-*")) and time.monotonic() < end:
        time.sleep(0.02)
    for path in [*Path("/sys/class/net").glob(f"{switch}-*"), Path("/sys/class/net", switch)]:
        with contextlib.suppress(RuntimeError):
            _ip("link", "del", path.name)
