"""The whole product on two nodes of one machine: where cached tokens come from, asked over HTTP. Run by
``test_tiers.py``.

A process of its own: ``ray.cluster_utils.Cluster`` is another Ray than the one of the test session.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from deployments.model import model_application
from serve_app.app import GATEWAY, gateway_application
from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT, load_catalog
from serve_app.config import api_key, load_settings
from serve_app.kv.cached_tokens import FOUND
from serve_app.kv.pool import PoolOptions, get_or_create_pool
from serve_app.tasks.model import application_name
from tests.e2e.pair.client import body, prompt
from tests.waiting import wait_for

MB = 1 << 20
MODEL = "@cf/pico/spread"
TOKENS = 15 * 32  # and one more, which is always computed; two chunks
BLOCK_BYTES = 6 * 2 * 2 * 64 * 4 * 32  # layers, K and V, heads, their size, float32, tokens
# Prompts that a worker's own cache and a node's pool hold.
IN_WORKER, IN_POOL = 5, 12


def record() -> dict[str, Any]:
    """One decode replica a node, which computes its prompts itself."""
    found = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    del found["draft"]
    decode = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 1.5, "max_num_seqs": 4}
    decode["kv_cache_bytes"] = (IN_WORKER * 16 + 1) * BLOCK_BYTES
    return {
        **found,
        "id": MODEL,
        "weights": {"path": str(PROJECT_ROOT / "checkpoints" / "pico-instruct")},
        "properties": {**found["properties"], "context_window": 2048},
        "serving": {"gpu": {"decode": decode, "min_remote_prefill_tokens": 4096}},
    }


class Client:
    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)

    def workers(self) -> dict[str, Any]:
        """What the gateway tells of the model; empty while there is none."""
        try:
            return self._http.get("/v1/status").json()["models"][MODEL]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}

    def ask(self, seed: int) -> tuple[str, str, dict[str, int]]:
        """The answer, the replica, and the prompt's tokens by tier, of which usage and path say the same."""
        answer = self._http.post(
            "/v1/completions", json={**body(0, 12, prompt=prompt(seed, TOKENS + 1)), "model": MODEL}
        )
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]

        def ended() -> dict[str, Any]:
            told = self._http.get(f"/v1/requests/{answer.headers['cf-ray']}").json()
            events = {event["event"]: event for event in told["events"]}
            return events if told["status"] == "done" and "decoded" in events else {}

        events = wait_for(ended)
        decoded = events["decoded"]
        found = {tier: decoded[tier] for tier in FOUND}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == events["done"]["cached_tokens"] == sum(found.values()), (usage, decoded)
        assert usage["prompt_tokens"] == TOKENS + 1 == cached + decoded["prefilled"] + decoded["computed"], decoded
        text = answer.json()["choices"][0]["text"]
        return text, decoded["replica"], {tier: count for tier, count in found.items() if count}


def end(pid: int) -> None:
    """Kills a process and returns when it has ended."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([descriptor], [], [], 60)
    os.close(descriptor)


def main(home: Path) -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 * MB})
    try:
        second = cluster.add_node(num_cpus=2, object_store_memory=100 * MB)
        ray.init(address=cluster.address, namespace="serve_app", log_to_driver=False)
        files = {"disk_directory": str(home / "kv"), "disk_bytes": 64 * MB}
        options = PoolOptions(limit_bytes=IN_POOL * 16 * BLOCK_BYTES, **files)
        pools = [get_or_create_pool(node.node_id, options) for node in (cluster.head_node, second)]

        (home / "models").mkdir(parents=True)
        (home / "models" / "spread.yaml").write_text(yaml.safe_dump(record()))
        settings = load_settings(None, home=str(home), profile="gpu", models=(MODEL,), port=int(os.environ["PORT"]))
        catalog = load_catalog(home)
        model = model_application(catalog[MODEL], catalog[MODEL].serving["gpu"], settings, catalog.source(MODEL))
        serve.start(http_options={"host": settings.host, "port": settings.port, "location": "HeadOnly"})
        targets = [
            serve.RunTarget(target=gateway_application(settings), name=GATEWAY, route_prefix="/"),
            serve.RunTarget(target=model, name=application_name(MODEL), route_prefix=None),
        ]
        serve.run_many(targets, wait_for_applications_running=False)
        client = Client(f"http://127.0.0.1:{settings.port}", api_key(settings))

        def reporting() -> dict[str, str]:
            """Replicas and their roles."""
            return {w["replica"]: w["role"] for w in client.workers().get("routing", {}).get("workers", ())}

        wait_for(lambda: sorted(reporting().values()) == ["decode", "prefill"], 120)
        steps: list[dict[str, int]] = []
        first, home_of_it, found = client.ask(1)
        steps.append(found)

        def again() -> str:
            text, replica, found = client.ask(1)
            assert text == first, (text, first)
            steps.append(found)
            return replica

        known = {1: first}

        def others(seeds: range) -> None:
            for seed in seeds:
                known[seed], *path = client.ask(seed)
                assert path == [home_of_it, {}]

        def written() -> bool:
            told = [pool["disk"] for pool in ray.get([pool.stats.remote() for pool in pools])]
            return sum(disk["chunks"] for disk in told) >= 2 and not any(disk["queued_bytes"] for disk in told)

        assert again() == home_of_it
        others(range(100, 100 + IN_WORKER + 1))
        assert again() == home_of_it
        others(range(200, 200 + IN_POOL + 1))
        wait_for(written)
        assert again() == home_of_it
        # Its worker is lost, and what it had computed is asked for on the other node.
        for seed, said in known.items():
            workers = client.workers()["workers"]
            end(max(workers, key=lambda worker: worker["prompt_tokens"])["pid"])
            text, replica, found = client.ask(seed)
            assert text == said, (text, said)
            if replica != home_of_it:
                steps.append(found)
                break
            # It was sent before the gateway had heard of the loss, and waited for the worker's successor.
            assert found == {"node": TOKENS}, found
        return {"steps": steps}
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tiers-") as scratch:
        print(json.dumps(main(Path(scratch) / "home")))
    sys.exit(0)
