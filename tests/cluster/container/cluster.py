"""The manifest's cluster: its pods on this machine, and what KubeRay's operator does with them over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.container import kuberay
from tests.cluster.container.image import Image
from tests.cluster.container.pods import Container, Pod, Secrets
from tests.cluster.machines.network import Network
from tests.waiting import wait_for

# All pods together have the cores of one machine, which may have others to serve.
PATIENCE_S = 1800.0


class Cluster:
    def __init__(
        self, image: Image, objects: list[dict[str, Any]], network: Network, secrets: Secrets, folder: Path
    ) -> None:
        [self.service] = [each for each in objects if each["kind"] == "RayService"]
        self._image, self._network, self._secrets, self._folder = image, network, secrets, folder
        self._token = secrets["serve-app-ray"]["auth_token"]
        self.pods: list[Pod] = []

    def start(self) -> None:
        """As many pods as the manifest begins with, each until its probes are content; what serves is deployed."""
        config = self.service["spec"]["rayClusterConfig"]
        head = self._pod(config["headGroupSpec"], "head", "head", {})
        self.ready(head)
        names = {head.address: kuberay.HEAD_ADDRESS}
        for group in config["workerGroupSpecs"]:
            for number in range(group["replicas"]):
                self._pod(group, "worker", f"{group['groupName']}-{number}", names)
        for pod in self.pods[1:]:
            wait_for(lambda pod=pod: self.alive(pod) and pod.probe(pod.main, "liveness"), PATIENCE_S, 0.5)
        applications = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        self._dashboard("PUT", json=applications).raise_for_status()

    def _pod(self, group: dict[str, Any], role: str, name: str, hosts: dict[str, str]) -> Pod:
        manifest = kuberay.pod(self.service, group, role, name)
        pod = Pod(self._image, manifest, self._network, self._secrets, self._folder / name, hosts)
        self.pods.append(pod)
        pod.begin()
        pod.start(pod.spec["containers"][0])
        return pod

    @property
    def head(self) -> Pod:
        return self.pods[0]

    def alive(self, pod: Pod) -> bool:
        assert pod.main.running, f"{pod.name} has ended: {pod.main.log.read_text()[-4000:]}"
        return True

    def ready(self, pod: Pod) -> None:
        wait_for(lambda: self.alive(pod) and pod.probe(pod.main, "readiness"), PATIENCE_S, 0.5)

    def _dashboard(self, method: str, **more: Any) -> httpx.Response:
        headers = {"x-ray-authorization": f"Bearer {self._token}"}
        url = f"http://{self.head.address}:{kuberay.DASHBOARD}/api/serve/applications/"
        return httpx.request(method, url, headers=headers, timeout=120, **more)

    def applications(self) -> dict[str, str]:
        """Their states, as the operator reads them."""
        try:
            told = self._dashboard("GET").json()["applications"]
        except (httpx.HTTPError, KeyError):
            return {}
        failed = {name: each["message"] for name, each in told.items() if "FAILED" in each["status"]}
        assert not failed, failed
        return {name: each["status"] for name, each in told.items()}

    def holding(self, deployment: str) -> list[Pod]:
        """Workers that run a replica of it."""
        running = [pod for pod in self.pods[1:] if pod.main.running]
        return [pod for pod in running if re.search(rf"ServeReplica:{deployment}\b", processes(pod.main, "args"))]

    def remove(self) -> None:
        for pod in self.pods:
            pod.remove()


def processes(container: Container, what: str) -> str:
    return container.run("ps", "-eo", what).stdout
