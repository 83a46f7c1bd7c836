"""What the processes of the running stack have loaded."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from benchmarks.serving.processes import descendants
from serve_app.ray_private.environment import SERVING


def test_only_workers_have_loaded_torch(stack):
    titles, holders = set(), set()
    for pid in descendants(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            titles.add(title)
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                holders.add(title)
    assert any("ServeController" in title for title in titles) and any("fork_server" in title for title in titles)
    assert any(title.startswith("ray::KVPool") for title in titles)
    allowed = re.compile(r"ray::\w*Worker|.*fork_server \d+ torch$")
    assert holders and all(allowed.match(title) for title in holders), holders


def test_workers_are_nicer_than_rays_daemons_and_no_nicer_than_they_were_told(stack):
    found = {}
    for pid in descendants(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            found[title] = os.getpriority(os.PRIO_PROCESS, pid)
    told = os.getpriority(os.PRIO_PROCESS, 0) + int(SERVING["RAY_worker_niceness"])
    replicas = {title: nice for title, nice in found.items() if re.match(r"ray::(ServeReplica|EngineWorker)", title)}
    assert replicas and set(replicas.values()) == {told}, replicas
