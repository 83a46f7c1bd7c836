"""Applications of their own on the session's Serve: two gateways, and a model with workers behind them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray import serve

from deployments.model import model_application
from serve_app.app import gateway_application
from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT, load_catalog
from serve_app.config import api_key, load_settings
from serve_app.tasks.model import application_name
from tests.ray_private.names import replica_ports

MODEL = "@cf/pico/pair"
# Of each decode worker: few enough that a test can fill them, and a cache that a few prompts fill.
SLOTS, BLOCKS = 4, 80
BLOCK_BYTES = 6 * 2 * 2 * 64 * 4 * 32  # layers, K and V, heads, their size, float32, tokens


@dataclass(frozen=True)
class Shape:
    """What the gateways are called, and how many workers of each stage are behind them."""

    name: str = "pair"
    decode: int = 2
    prefill: int = 0

    @property
    def model(self) -> str:
        return f"@cf/pico/{self.name}"

    @property
    def workers(self) -> int:
        return self.decode + self.prefill


@dataclass(frozen=True)
class Pair:
    """What a client sees of it: ``url`` is HAProxy's; :meth:`gateways` reaches the one or the other past it."""

    url: str
    key: str
    home: Path
    shape: Shape = Shape()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def gateways(self) -> list[str]:
        """The addresses of the gateways that HAProxy sends requests to."""
        return sorted(f"http://127.0.0.1:{port}/{self.shape.name}" for port in replica_ports(self.shape.name))

    def status(self, gateway: str) -> dict[str, Any]:
        """What one gateway tells about the model."""
        answer = httpx.get(f"{gateway}/v1/status", headers=self.headers, timeout=120)
        return answer.json()["models"][self.shape.model]

    @staticmethod
    def settled(told: dict[str, Any]) -> bool:
        """Whether both gateways hold the workers for the same: one plans, and the other hears of it."""
        roles = [{w["replica"]: w["role"] for w in one["routing"]["workers"]} for one in told.values()]
        planning = [one["routing"]["plan"]["why"] != "another gateway plans" for one in told.values()]
        return sorted(planning) == [False, True] and roles[0] == roles[1] and "mixed" not in roles[0].values()

    def wait_ready(self, seconds: float = 120) -> list[str]:
        """Until both gateways hear the same of all workers; their addresses."""
        until = time.monotonic() + seconds
        found: Any = None
        while time.monotonic() < until:
            try:
                found = {url: self.status(url) for url in self.gateways()}
                heard = [{w["replica"] for w in told["routing"]["workers"]} for told in found.values()]
                all_heard = [len(replicas) for replicas in heard] == [self.shape.workers] * 2
                if all_heard and self.settled(found):
                    return list(found)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                found = error
            time.sleep(0.2)
        raise AssertionError(f"not ready after {seconds} s: {found}")

    @property
    def workers(self) -> list[dict[str, Any]]:
        """Counters of the engines themselves, as any gateway gets them."""
        until = time.monotonic() + 60
        while (told := self.status(self.gateways()[0]))["silent"]:
            assert time.monotonic() < until, f"still silent: {told['silent']}"
            time.sleep(0.2)
        return told["workers"]

    @property
    def idle(self) -> bool:
        found = self.workers
        return len(found) == self.shape.workers and all(
            w["running"] == w["waiting"] == w["used_blocks"] == 0 for w in found
        )


def _record(shape: Shape) -> dict[str, Any]:
    record = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    each = {"num_cpus": 0.25, "max_batch_tokens": 512, "max_num_seqs": SLOTS}
    each["kv_cache_bytes"] = (BLOCKS + 1) * BLOCK_BYTES
    if shape.prefill:
        each["cpu_threads"] = 1
    counts = {"decode": shape.decode, "prefill": shape.prefill}
    stages = {name: {**each, "min_replicas": n, "max_replicas": n} for name, n in counts.items() if n}
    del record["draft"]
    return {
        **record,
        "id": shape.model,
        "weights": {"path": str(PROJECT_ROOT / "checkpoints" / "pico-instruct")},
        "properties": {**record["properties"], "context_window": 2048},
        # A token costs a neuron.
        "price": {"input": 11, "output": 11},
        # Where there is a prefill stage, every prompt goes by way of it.
        "serving": {"local": {**stages, **({"min_remote_prefill_tokens": 0} if shape.prefill else {})}},
    }


@contextmanager
def deployed(stack: Any, home: Path, shape: Shape = Shape()) -> Iterator[Pair]:  # noqa: B008 - frozen
    (home / "models").mkdir(parents=True)
    (home / "models" / f"{shape.name}.yaml").write_text(yaml.safe_dump(_record(shape)))
    settings = load_settings({"SERVE_APP_HOME": str(home), "SERVE_APP_MODELS": shape.model})
    catalog = load_catalog(home)
    record = catalog[shape.model]
    model = model_application(record, record.serving["local"], settings, catalog.source(shape.model))
    bound = gateway_application(settings, replicas=(2, 2))
    targets = [
        serve.RunTarget(target=model, name=application_name(shape.model), route_prefix=None),
        serve.RunTarget(target=bound, name=shape.name, route_prefix=f"/{shape.name}"),
    ]
    serve.run_many(targets, wait_for_applications_running=False)
    try:
        pair = Pair(f"{stack.url}/{shape.name}", api_key(settings), home, shape)
        pair.wait_ready()
        yield pair
    finally:
        serve.delete(shape.name, _blocking=False)
        serve.delete(application_name(shape.model), _blocking=False)
