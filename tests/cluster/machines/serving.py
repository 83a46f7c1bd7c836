"""The applications on a cluster of machines, deployed as on any cluster, and clients who compare what they get."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import httpx
import yaml

from serve_app.catalog.load import BUILT_IN
from tests.cluster.machines.network import Machine, Network
from tests.cluster.machines.ray_nodes import BIN, PORT, ROOT, RayCluster
from tests.e2e.conftest import eos_id
from tests.waiting import wait_for

MODEL, KEY = "@cf/pico/far", "k" * 20
HEADERS = {"Authorization": f"Bearer {KEY}"}
APPLICATION = "cf--pico--far"
# On a node with two processors there is room for one worker, and beside it for a gateway.
WORKER_CPUS = 1.5
# All machines together have the cores of one, which may have others to serve.
PATIENCE_S = 1800.0
ASKED = [
    "What does itertools.chain do?", "What does math.sqrt do?", "What does os.path.join do?", "What does len do?",
    "What does str.split do?", "What does json.dumps do?",
]  # fmt: skip


def record(**stages: int) -> dict[str, Any]:
    """The shipped model as it would be served on a cluster, by processors: so many workers of each stage."""
    record = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    for unused in ("draft", "lora"):
        del record[unused]
    size = {"num_cpus": WORKER_CPUS, "cpu_threads": 1, "kv_cache_bytes": "64MiB", "max_batch_tokens": 512,
            "max_num_seqs": 16}  # fmt: skip
    serving: dict[str, Any] = {
        stage: {**size, "min_replicas": count, "max_replicas": count} for stage, count in stages.items()
    }
    weights = {"path": str(ROOT / "checkpoints" / "pico-instruct")}
    return {**record, "id": MODEL, "weights": weights, "serving": {"gpu": {**serving, "min_remote_prefill_tokens": 0}}}


class Served(RayCluster):
    """A head, nodes named a, b, ... and the model on them. Its address is the head's HAProxy. ``zones``: of the nodes,
    where then no worker has a role that is strict.
    """

    def __init__(
        self, network: Network, nodes: int, zones: tuple[str, ...] = (), redis: str = "", **stages: int
    ) -> None:
        served = record(**stages)
        if zones:
            served["serving"]["gpu"]["min_remote_prefill_tokens"] = 256
        files = {"/run/home/models/far.yaml": yaml.safe_dump(served)}
        super().__init__(network, files, redis, SERVE_APP_API_KEY=KEY)
        self.url = f"http://{self.head.address}:8000"
        for name, zone in zip_longest("abcdef"[:nodes], zones):
            self.add(name, **({"SERVE_APP_ZONE": zone} if zone else {}))
        program = (
            f"{BIN}/serve-app config gpu --models {MODEL} > /run/config.yaml && {BIN}/serve deploy /run/config.yaml"
        )
        self.run("bash", "-c", program)

    def expected(self, tokens: int, questions: int = len(ASKED)) -> dict[str, str]:
        """What the model says, once it is there."""
        return ask_all(self.url, MODEL, KEY, tokens, questions)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/v1/status", headers=HEADERS, timeout=60).json()["models"][MODEL]
        return told

    def lost(self, request: str) -> int | None:
        """How many tokens a request had when its worker was lost; None if none was."""
        answer = httpx.get(f"{self.url}/v1/requests/{request}", headers=HEADERS, timeout=60)
        assert answer.status_code == 200, answer.text
        had = [event["tokens"] for event in answer.json()["events"] if event["event"] == "worker lost"]
        return had[0] if had else None

    def workers(self) -> list[dict[str, Any]]:
        """As the gateway sees them: with their replicas and nodes."""
        try:
            found: list[dict[str, Any]] = self.status()["routing"]["workers"]
        except (httpx.HTTPError, KeyError):
            return []
        return found

    def decoded(self) -> dict[str, int]:
        """Tokens that workers have generated since they started, by the zone of their nodes."""
        told = self.status()
        zones = {one["replica"]: one["zone"] for one in told["routing"]["workers"]}
        found = Counter[str]()
        for worker in told["workers"]:
            found[zones[worker["replica"]]] += worker["generated_tokens"]
        return dict(found)

    def scale(self, replicas: int) -> None:
        """The model's decode workers, by hand."""
        asked = {"model": MODEL, "action": "scale", "stage": "decode", "replicas": replicas}
        url = f"{self.url}/client/v4/accounts/local/ai/models/actions"
        for _ in range(5):
            answer = httpx.post(url, headers=HEADERS, json=asked, timeout=120)
            # Serve's controller has the cores when it gets them; to ask again is what the answer says.
            if answer.status_code != 503:
                break
        assert answer.status_code == 200, answer.text

    def node_id(self, machine: Machine) -> str:
        program = (
            "import ray; ray.init(address='auto', log_to_driver=False);"
            " [print(node['NodeID'], node['NodeManagerAddress']) for node in ray.nodes()]"
        )
        said = self.run(sys.executable, "-c", program)
        [found] = re.findall(rf"(?m)^([0-9a-f]{{56}}) {re.escape(machine.address)}$", said)
        return str(found)

    def drain(self, machine: Machine) -> None:
        """Says, as an autoscaler or a cloud does, that the machine goes away in five minutes."""
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=300"]
        address = f"--address={self.head.address}:{PORT}"
        self.run(BIN / "ray", "drain-node", address, f"--node-id={self.node_id(machine)}", *reason)

    @staticmethod
    def holds(machine: Machine, deployment: str) -> bool:
        """Whether a replica of a deployment runs there."""
        titles = machine.run("ps", "-eo", "args")
        return re.search(rf"ServeReplica:{deployment}\b", titles) is not None


def body(model: str, question: str, tokens: int, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    # Without an end of its own, so that answers are as long as is asked for.
    fixed = {"temperature": 0, "logit_bias": {str(eos_id()): -100}}
    return {"model": model, "messages": messages, "max_tokens": tokens, **fixed, **more}


def ask(url: str, model: str, key: str, question: str, tokens: int) -> str | None:
    """A whole answer; None while there is none."""
    headers, asked = {"Authorization": f"Bearer {key}"}, body(model, question, tokens)
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", headers=headers, json=asked, timeout=600)
    except httpx.HTTPError:
        return None
    return answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else None


async def seen(look: Callable[[], Any]) -> None:
    """Until a look at the cluster, which may take its time, says that something is so. Clients go on meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(look):
            await asyncio.sleep(0.5)


def ask_all(url: str, model: str, key: str, tokens: int, questions: int = len(ASKED)) -> dict[str, str]:
    """What the model says to so many of :data:`ASKED`, once it is there."""
    asked = ASKED[:questions]
    found = {question: wait_for(partial(ask, url, model, key, question, tokens), PATIENCE_S, 0.5) for question in asked}
    return {question: text for question, text in found.items() if text}


@dataclass
class Clients:
    """Many who ask, each one stream after the other, and compare: ``right`` streams had the text and the end that
    they should; of others ``wrong`` says what was wrong.
    """

    url: str
    expected: dict[str, str]
    tokens: int
    model: str = MODEL
    key: str = KEY
    right: int = 0
    refused: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # between two events of a stream
    # Ids of streams that have begun and not ended.
    under_way: set[str] = field(default_factory=set)
    took_s: list[float] = field(default_factory=list)  # by streams that were right
    _over: bool = False

    async def run(self, clients: int) -> None:
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=180, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(number)) for number in range(clients)))

    def stop(self) -> None:
        """Who has a stream reads it to its end."""
        self._over = True

    @property
    def done(self) -> int:
        return self.right + sum(self.wrong.values())

    def counted(self) -> dict[str, Any]:
        longest = round(self.longest_s, 2)
        return {"right": self.right, "refused": self.refused, "longest_s": longest, "wrong": dict(self.wrong)}

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._over:
            question, since = rng.choice(list(self.expected)), time.monotonic()
            try:
                said = await self._stream(http, question)
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            if said is None:
                self.right += 1
                self.took_s.append(time.monotonic() - since)
            elif said == "refused":
                self.refused += 1
                await asyncio.sleep(0.5)
            else:
                self.wrong[said[:200]] += 1

    async def _stream(self, http: httpx.AsyncClient, question: str) -> str | None:
        """What was wrong with it."""
        text, ended, last = "", False, time.monotonic()
        asked = body(self.model, question, self.tokens, stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            if answer.status_code in (429, 503):
                return "refused"
            if answer.status_code != 200:
                return f"status {answer.status_code}: {(await answer.aread()).decode()}"
            name = answer.headers["cf-ray"]
            self.under_way.add(name)
            try:
                async for line in answer.aiter_lines():
                    now = time.monotonic()
                    self.longest_s, last = max(self.longest_s, now - last), now
                    ended = ended or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        frame = json.loads(line[6:])
                        if "error" in frame:
                            return f"error: {frame['error']}"
                        text += "".join(choice["delta"].get("content") or "" for choice in frame["choices"])
            finally:
                self.under_way.discard(name)
        if not ended:
            return "cut"
        return None if text == self.expected[question] else f"another text: {text!r} for {self.expected[question]!r}"
