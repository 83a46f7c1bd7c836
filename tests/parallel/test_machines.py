"""Ranks on two machines, each with a network of its own, whose names say nothing of their addresses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.parallel.meeting import interface_towards
from tests import tiny
from tests.parallel.test_divided import NEW_TOKENS, prompts

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "10.213.7.1", "10.213.7.2"


def test_the_interface_is_the_one_that_leads_there():
    assert interface_towards("127.0.0.1") == interface_towards("127.0.0.2") == "lo"
    assert interface_towards("no address") == ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines():
    """Two network namespaces with a cable between them; this needs rights that root alone has."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("no network namespaces without iproute2 and root")
    names = [f"ranks-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"rk{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", cables[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tensor", "pipeline"), [("llama", 2, 2), ("deepseek_v3", 1, 2)])
def test_stages_of_a_model_on_two_machines(machines, tmp_path, family, tensor, pipeline):
    path = tiny.write_checkpoint(tmp_path / family, family)
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ.pop("GLOO_SOCKET_IFNAME", None)
    command = [
        sys.executable,
        "-m",
        "tests.parallel.machines",
        str(path),
        FIRST,
        machines[1],
        str(tensor),
        str(pipeline),
    ]
    done = subprocess.run(
        ["ip", "netns", "exec", machines[0], *command], env=environ, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(answers == expected for answers in found["answers"])
    assert found["peers"] == sorted({FIRST, SECOND} if tensor > 1 else {SECOND})
    assert found["lost"].startswith(f"rank {tensor * pipeline - 1} of {tensor * pipeline} ")
