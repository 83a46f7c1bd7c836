"""Ray's own daemons, as the process that started them sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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


def ended_daemons() -> list[str]:
    """Names of the daemons of this process's Ray (``gcs_server``, ``raylet``, ...) that have ended by themselves."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes()]
