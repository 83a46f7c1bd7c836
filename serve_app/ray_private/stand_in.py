"""Keeps the port of an HAProxy that was killed until Serve has started another. ``haproxy.sh`` runs this file by its
path beside each HAProxy, with any Python: standard library only.

::

    HAProxy  ----x killed        (Serve notices, ends its actor, starts another: seconds)        HAProxy ----
    this         |-> stand-in: the same configuration without admin socket, metrics, statistics --|  takes the port over

Serve takes who answers the admin socket for its own process, so the stand-in has none. The next HAProxy gets its pid by
``-sf``: it takes the port over and lets the stand-in end what it has under way, as at a reload. Configurations of both
are ``haproxy_config.py``'s.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

# The pid of the HAProxy that was started last in a folder; that of a stand-in; what it reads.
NEWEST, STAND_IN, CONFIG = "newest.pid", "stand-in.pid", "stand-in.cfg"
# How often it is looked whether another HAProxy has been started by a reload; how long a stand-in waits for the next.
LOOK_S, LONGEST_S = 2.0, 60.0


def main(pid: int, folder: Path, command: list[str]) -> None:
    """Waits for the end of the HAProxy ``pid``. ``command`` starts one with the configuration whose path is added."""
    os.setsid()  # Ray ends the process group of an actor
    if not hasattr(os, "pidfd_open"):  # no Linux
        return
    try:
        killed = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        pass
    else:
        while not select.select([killed], [], [], LOOK_S)[0]:
            if not _newest(folder, pid):
                return
    # One that has a successor has ended as it was told to.
    if not _newest(folder, pid) or not (folder / CONFIG).exists():
        return
    running = subprocess.Popen([*command, "-f", str(folder / CONFIG)])
    (folder / STAND_IN).write_text(str(running.pid))
    until = time.monotonic() + LONGEST_S
    while running.poll() is None:
        if not folder.exists():  # the server has ended
            running.kill()
        elif time.monotonic() > until:
            running.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
    if (folder / STAND_IN).exists() and (folder / STAND_IN).read_text() == str(running.pid):
        (folder / STAND_IN).unlink(missing_ok=True)


def _newest(folder: Path, pid: int) -> bool:
    try:
        return (folder / NEWEST).read_text().strip() == str(pid)
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
