"""Ray's own daemons, as the process that started them sees them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Of Ray's Node: what starts the cluster's autoscaler, the process that passes logs on to drivers that want them, and
# the dashboard's server, which runs without the dashboard as well. One machine does not grow, our drivers want no
# logs, and nobody asks that server; each takes a second of processor time to start and 80 MB.
NOT_ON_ONE_MACHINE = ("start_monitor", "start_log_monitor", "start_api_server")


@contextlib.contextmanager
def one_machine() -> Iterator[None]:
    """A Ray that is started herein leaves out the daemons which one machine has no use for."""
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in NOT_ON_ONE_MACHINE}
    try:
        for name in NOT_ON_ONE_MACHINE:
            setattr(Node, name, lambda node, **_: None)
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def others_may_write(folder: str) -> bool:
    """Whether another user can put a file there, or a folder of the own in its place."""
    place = Path(os.path.realpath(folder))
    try:
        found = [one.stat() for one in (place, *place.parents)]
    except OSError:
        return True
    # In a folder with the sticky bit others make new files, but leave alone what is there.
    open_to_all = [bool(one.st_mode & stat.S_IWOTH) and not (n and one.st_mode & stat.S_ISVTX)
                   for n, one in enumerate(found)]  # fmt: skip
    return any(open_to_all) or any(one.st_uid not in (0, os.getuid()) for one in found)


class _Trusted(list[str]):
    """Folders that workers import from."""

    def extend(self, folders: Iterable[str]) -> None:
        super().extend(folder for folder in folders if not others_may_write(folder))


def job_config() -> Any:
    """Of a driver: Ray has workers look for modules in the folder that it was started in before all others, so one
    where another user may write, such as the place of temporary files, must not be among them.
    """
    from ray.job_config import JobConfig

    made = JobConfig()
    made._py_driver_sys_path = _Trusted()
    return made


def ended_daemons() -> list[str]:
    """Names of the daemons of this process's Ray (``gcs_server``, ``raylet``, ...) that have ended by themselves."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes()]
