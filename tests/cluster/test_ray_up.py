"""``ray up cluster.yaml`` in full, on a cloud whose machines are namespaces of this one (``machines/cloud``).

Everything that the file says is done for real: machines are made and ended by Ray's own autoscaler, which logs in by
ssh, copies the project, runs the setup commands and starts Ray. Not there: a network to fetch packages from, so that
they are in the machines' image, as is Python; and GPUs, so that the model computes on CPUs, of which a machine says
that it has 96. Types and memory of machines are what they say as well (``machines/cloud/server.py``).
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.catalog.load import BUILT_IN
from tests.cluster.machines.cloud.provider import KEY
from tests.cluster.machines.cloud.server import SDK, Cloud
from tests.cluster.machines.cloud.server import why_not as why_no_cloud
from tests.cluster.machines.network import Machine, network, why_not
from tests.cluster.machines.ray_nodes import BIN, ROOT
from tests.cluster.machines.serving import PATIENCE_S, Clients, ask_all, seen
from tests.waiting import until

MODEL = "@cf/pico/up"
# What a replica asks for: a machine of the type `gpu` has room for one.
CPUS = 60
MINE = "serve_config/mine.yaml"


def record() -> dict[str, Any]:
    """The shipped model as a model of the cluster, with more workers where more is asked."""
    found = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    for unused in ("draft", "lora"):
        del found[unused]
    decode = {"min_replicas": 1, "max_replicas": 2, "num_cpus": CPUS, "cpu_threads": 1, "kv_cache_bytes": "64MiB",
              "max_batch_tokens": 512, "max_num_seqs": 4, "target_ongoing_requests": 4, "upscale_delay_s": 2,
              "downscale_delay_s": 180}  # fmt: skip
    return {**found, "id": MODEL, "serving": {"gpu": {"decode": decode}}}


def changed(text: str, cloud: Cloud) -> str:
    """``cluster.yaml`` for this cloud: another provider, and machines that are given back sooner. All else stays."""
    whole = yaml.safe_load(text)
    whole["provider"] |= {"type": "external", "module": "namespaces.Namespaces", "url": cloud.url}
    whole["idle_timeout_minutes"] = 0.5
    # What Ray fills in for AWS: for providers that are not its own it has nothing.
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    defaults = yaml.safe_load((Path(spec.origin).parent / "autoscaler" / "aws" / "defaults.yaml").read_text())
    whole = {**defaults, **whole}
    return yaml.safe_dump(whole, sort_keys=False)


class Desk:
    """The machine of whoever runs ``ray up``, with the project on it."""

    def __init__(self, machine: Machine, cloud: Cloud) -> None:
        self.machine = machine
        copied = [path.name for path in ROOT.iterdir() if path.name not in (".git", ".venv")]
        machine.run(
            "bash", "-c", f"mkdir -p /root/project /root/.ssh && cd {ROOT} && cp -r {shlex.join(copied)} /root/project"
        )
        machine.run(
            "install", "-D", Path(__file__).parent / "machines" / "cloud" / "provider.py", f"{SDK}/namespaces.py"
        )
        machine.write(KEY.replace("~", "/root"), cloud.key.read_text())
        machine.write("/root/project/serve_app/catalog/models/up.yaml", yaml.safe_dump(record()))
        machine.write("/root/project/cluster.yaml", changed((ROOT / "cluster.yaml").read_text(), cloud))
        self.do("ray get-auth-token --generate")

    def do(self, command: str, seconds: float = 600) -> str:
        """A line of the documentation, in the project's folder."""
        environment = {
            "HOME": "/root", "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TERM": "dumb",
            "LANG": "C.UTF-8", "PYTHONPATH": f"/root/project:{SDK}", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        return self.machine.run("bash", "-c", f"cd /root/project && {command}", seconds=seconds, env=environment)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    if reason := why_not() or why_no_cloud():
        pytest.skip(reason)
    with network() as switch, Cloud(switch).open() as opened:
        yield opened


@pytest.mark.slow
async def test_a_cluster_comes_up_grows_shrinks_and_goes(cloud: Cloud) -> None:
    desk = await asyncio.to_thread(lambda: Desk(cloud.network.machine("desk"), cloud))

    async def do(command: str, seconds: float = 900) -> str:
        said = await asyncio.to_thread(desk.do, command, seconds)
        print(f"$ {command}\n{said[-3000:]}", flush=True)
        return said

    def living(kind: str) -> list[Machine]:
        return [one for name, one in cloud.made.items() if cloud.types[name] == kind and one.running]

    try:
        for attempt in range(5):
            try:
                await do("ray up -y cluster.yaml 2>&1")
                break
            except RuntimeError as error:
                # Ray gives a node 30 s to start and no setting for it, too little where the cores are busy. Again, as
                # whoever sits there would do it.
                if attempt == 4 or "timed out during startup" not in str(error):
                    raise
        [head] = living("m6i.2xlarge")
        await seen(lambda: len(living("p4de.24xlarge")) == 1)
        await do(f"serve-app config gpu --models {MODEL} > {MINE}")
        await do(f"ray rsync-up cluster.yaml {MINE} /home/ubuntu/serve-app/{MINE} 2>&1")
        await do(f"ray exec cluster.yaml '. ~/.serve_app_env && cd ~/serve-app && .venv/bin/serve deploy {MINE}' 2>&1")
        # The head makes it when it builds the applications, which it does behind the answer to `serve deploy`.
        wait = "until test -s ~/.serve_app/api_key; do sleep 1; done; cat ~/.serve_app/api_key"
        said = await do(f"ray exec cluster.yaml {shlex.quote(wait)} 2>/dev/null")
        [key] = re.findall(r"(?m)^([\w-]{40,})\s*$", said)
        url = f"http://{head.address}:8000"
        expected = await asyncio.to_thread(ask_all, url, MODEL, key, 60)
        # One client as long as there is anything, and many until another machine is made, which then has the cores to
        # itself; what they wanted is remembered for three minutes.
        few, many = (Clients(url, expected, 60, model=MODEL, key=key) for _ in range(2))
        asking = [asyncio.create_task(few.run(1)), asyncio.create_task(many.run(24))]
        await seen(lambda: len(living("p4de.24xlarge")) == 2)
        many.stop()
        await asking[1]
        await seen(lambda: sum(holds_decode(one) for one in living("p4de.24xlarge")) == 2)
        again = Clients(url, expected, 60, model=MODEL, key=key)
        asking.append(asyncio.create_task(again.run(16)))
        await until(lambda: again.done >= 100, PATIENCE_S)
        again.stop()
        await asking[2]
        await seen(lambda: len(living("p4de.24xlarge")) == 1)
        told = few.done
        await until(lambda: few.done >= told + 20, PATIENCE_S)
        few.stop()
        await asking[0]
        print(json.dumps([one.counted() for one in (few, many, again)]))
        assert not few.wrong and not many.wrong and not again.wrong
        await do("ray down -y cluster.yaml 2>&1")
        assert not living("p4de.24xlarge") and not living("m6i.2xlarge")
    except BaseException:
        for name, one in cloud.made.items():
            if one.running:
                print(
                    name,
                    one.run("bash", "-c", "tail -n 40 /home/ubuntu/.ray/tmp/session_latest/logs/monitor* 2>&1; true"),
                )
        raise


def holds_decode(machine: Machine) -> bool:
    try:
        return "ServeReplica:cf--pico--up:Decode" in machine.run("ps", "-eo", "args")
    except RuntimeError:  # given back meanwhile, as one on which Ray did not start in time
        return False


def test_nothing_but_the_provider_and_the_idle_time_is_changed() -> None:
    text = (ROOT / "cluster.yaml").read_text()

    class Nowhere:
        url = "http://nowhere"

    before, after = yaml.safe_load(text), yaml.safe_load(changed(text, Nowhere()))  # type: ignore[arg-type]
    assert {key for key in before if before[key] != after[key]} == {"provider", "idle_timeout_minutes"}
    # Beside what the file says there is what Ray fills in for AWS.
    filled_in = {"docker", "cluster_synced_files", "file_mounts_sync_continuously"}
    assert {key for key in after if key not in before} <= filled_in
    assert {k: v for k, v in after["provider"].items() if k not in ("type", "module", "url")} == {
        k: v for k, v in before["provider"].items() if k != "type"
    }
