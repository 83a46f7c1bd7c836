"""A model cannot be built anew: its replicas go on, and every gateway says so, whenever it has started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.processes import descendants, name_of
from tests.cluster.ray_start import MODEL, Cluster, asking, first_answer
from tests.waiting import wait_for

BROKEN = "this release cannot be imported"


def health(cluster: Cluster) -> dict[str, Any]:
    with suppress(httpx.HTTPError, ValueError, KeyError):
        found = httpx.get(f"{cluster.url}/health", timeout=30).json()["models"][MODEL]
        return {name: said for name, said in found.items() if name != "stages"}  # how long each is up
    return {}


def gateway(cluster: Cluster) -> int:
    return wait_for(lambda: next((pid for pid in descendants(cluster.node.pid) if is_gateway(pid)), None))


def is_gateway(pid: int) -> bool:
    with suppress(OSError):  # it has just ended
        return name_of(pid).startswith("ray::ServeReplica:gateway:Gateway")
    return False


@pytest.mark.slow
def test_a_gateway_that_starts_after_it_knows_what_one_knows_that_was_there(folder: Path) -> None:
    (folder / "next" / "serve_app").mkdir(parents=True)
    (folder / "next" / "serve_app" / "__init__.py").write_text(f"raise ImportError({BROKEN!r})\n")

    def break_model(config: dict[str, Any]) -> None:
        for application in config["applications"]:
            if "model" in application["args"]:
                application.setdefault("runtime_env", {}).setdefault("env_vars", {})["PYTHONPATH"] = str(
                    folder / "next"
                )

    cluster = Cluster(folder)
    cluster.deploy()
    text = wait_for(lambda: first_answer(cluster), 600)
    cluster.deploy(break_model)
    before = wait_for(lambda: found if (found := health(cluster)).get("state") == "deploy_failed" else None, 300)
    assert before["ready"] and BROKEN in before["message"]
    assert cluster.ask() == text

    first = gateway(cluster)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: first not in descendants(cluster.node.pid))
    wait_for(lambda: health(cluster).get("state") == "deploy_failed", 300)
    assert gateway(cluster) != first
    wait_for(lambda: health(cluster)["ready"], 60)
    assert health(cluster) == before
    assert cluster.ask() == text

    # Mended, it is built, and nothing of the failure is left.
    with asking(cluster, 2) as got:
        cluster.deploy()
        wait_for(lambda: health(cluster).get("state") == "running", 600)
        assert "message" not in health(cluster)
        told = len(got)
        wait_for(lambda: len(got) >= told + 4, 300)
    assert set(got) == {text}
