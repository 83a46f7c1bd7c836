"""Pods on this machine, as a kubelet starts them: a network and an address of their own, and in each container the
image's root, the pod's volumes, its user, no capabilities and nothing to gain any.

What is missing of a real one: limits of processor and memory (cgroups), the seccomp filter, and the million of open
files that container runtimes allow.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.container.image import Image
from tests.cluster.container.kuberay import number
from tests.cluster.machines.network import Machine, Network

Secrets = Mapping[str, Mapping[str, str]]
PERMITTED = {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem", "runAsNonRoot", "runAsUser"}
PERMITTED |= {"runAsGroup", "seccompProfile"}
# How the first process of a shared namespace is called, which takes all those that have ended.
PAUSE = "pause"


@dataclass
class Container:
    """One that was started. ``pid``: of its first process, as this machine counts."""

    name: str
    spec: dict[str, Any]
    variables: dict[str, str]
    user: list[str]
    log: Path
    pid: int | None  # None of one that had ended before it was seen
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def command(self, *words: str) -> list[str]:
        """How to run a program in it, as `kubectl exec` does."""
        spaces = ["--target", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wdns=/"]
        return ["nsenter", *spaces, *self.user, *words]

    def run(self, *words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip


@dataclass
class Pod:
    """``hosts``: what names mean beside the own, as a cluster's DNS says it."""

    image: Image
    manifest: dict[str, Any]
    network: Network
    secrets: Secrets
    folder: Path
    hosts: dict[str, str]
    machine: Machine = field(init=False)
    containers: dict[str, Container] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.machine = self.network.machine(self.name)
        hosts = {"127.0.0.1": "localhost", self.address: self.name, **self.hosts}
        (self.folder / "hosts").write_text("".join(f"{address} {host}\n" for address, host in hosts.items()))
        (self.folder / "hostname").write_text(f"{self.name}\n")
        (self.folder / "resolv.conf").write_text("")
        for volume in self.manifest["spec"]["volumes"]:
            self._volume(volume)

    @property
    def address(self) -> str:
        return self.machine.address

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def main(self) -> Container:
        return self.containers[self.spec["containers"][0]["name"]]

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    def _volume(self, volume: dict[str, Any]) -> None:
        """Empty, open to all, and of the pod's group, as a kubelet makes it."""
        [kind] = set(volume) - {"name"}
        assert kind == "emptyDir", volume
        place = self.folder / "volumes" / volume["name"]
        place.mkdir(parents=True)
        if volume["emptyDir"].get("medium") == "Memory":
            size = number(volume["emptyDir"]["sizeLimit"])
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "volume", str(place)], check=True)
        if group := self.spec.get("securityContext", {}).get("fsGroup"):
            os.chown(place, 0, group)
        place.chmod(0o2777)

    def begin(self) -> None:
        """What runs before the containers; each has to end well."""
        for spec in self.spec.get("initContainers", ()):
            container = self.start(spec)
            if code := container.process.wait(900):
                raise RuntimeError(f"{spec['name']} ended with {code}: {container.log.read_text()[-4000:]}")

    def start(self, spec: dict[str, Any]) -> Container:
        allowed = spec["securityContext"]
        assert set(allowed) <= PERMITTED and allowed["capabilities"] == {"drop": ["ALL"]}, allowed
        variables = self._variables(spec)
        words = [_expanded(word, variables) for word in [*spec["command"], *spec.get("args", ())]]
        group = allowed.get("runAsGroup", 0)
        user = ["setpriv", f"--reuid={allowed['runAsUser']}", f"--regid={group}"]
        extra = self.spec.get("securityContext", {}).get("fsGroup")
        user += [f"--groups={extra}" if extra else "--clear-groups"]
        user += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
        user += [] if allowed["allowPrivilegeEscalation"] else ["--no-new-privs"]
        mounts = [(self.folder / name, f"/etc/{name}", "rw") for name in ("hosts", "hostname", "resolv.conf")]
        # Those above others first.
        for mount in sorted(spec.get("volumeMounts", ()), key=lambda each: each["mountPath"]):
            assert set(mount) == {"name", "mountPath"}, mount
            mounts.append((self.folder / "volumes" / mount["name"], mount["mountPath"], "rw"))
        mode = "ro" if allowed["readOnlyRootFilesystem"] else "rw"
        shared = self.spec.get("shareProcessNamespace", False)
        first = ["sh", "-c", '"$@" & wait $!', PAUSE] if shared else []
        program = self.image.command(mode, mounts, [*first, *user, *words])
        log = self.folder / f"{spec['name']}.log"
        pod = ["nsenter", "--target", str(self.machine.init), "--net", "--uts", "--ipc"]
        environment = {**variables, "WORKDIR": self.image.recipe.folder}
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *pod, *program], env=environment,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
        pid = _main(process, shared)
        if pid is None and process.poll() != 0:
            raise RuntimeError(f"{spec['name']} did not start: {log.read_text()[-4000:]}")
        made = Container(spec["name"], spec, variables, user, log, pid, process)
        self.containers[spec["name"]] = made
        return made

    def _variables(self, spec: dict[str, Any]) -> dict[str, str]:
        found = {**self.image.recipe.environment, "HOSTNAME": self.name}
        for source in spec.get("envFrom", ()):
            reference = source["secretRef"]
            if reference["name"] in self.secrets or not reference.get("optional"):
                found |= self.secrets[reference["name"]]
        for each in spec.get("env", ()):
            if "value" in each:
                found[each["name"]] = _expanded(each["value"], found)
                continue
            if "fieldRef" in each["valueFrom"]:
                fields = {"status.podIP": self.address, "metadata.name": self.name}
                found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
                continue
            reference = each["valueFrom"]["secretKeyRef"]
            value = self.secrets.get(reference["name"], {}).get(reference["key"])
            if value is None and not reference.get("optional"):
                raise RuntimeError(f"the secret {reference['name']} has no {reference['key']}")
            if value is not None:
                found[each["name"]] = value
        return found

    def probe(self, container: Container, kind: str) -> bool:
        """What one of its probes says now. An HTTP probe comes from outside, as a kubelet's does."""
        asked = container.spec[f"{kind}Probe"]
        seconds = asked.get("timeoutSeconds", 1)
        if get := asked.get("httpGet"):
            named = {each["name"]: each["containerPort"] for each in container.spec.get("ports", ())}
            port = named.get(get["port"], get["port"])
            try:
                answer = httpx.get(f"http://{self.address}:{port}{get['path']}", timeout=seconds)
            except httpx.HTTPError:
                return False
            return 200 <= answer.status_code < 400
        try:
            return container.run(*asked["exec"]["command"], seconds=seconds).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def end(self, container: Container, grace: float) -> float:
        """Asks it to end, as a kubelet does: first its `preStop`, then SIGTERM. Returns the seconds that it took; one
        that is still there after ``grace`` seconds is killed, and that is an error.
        """
        began = time.monotonic()
        if hook := container.spec.get("lifecycle", {}).get("preStop"):
            done = container.run(*hook["exec"]["command"], seconds=grace)
            with open(container.log, "a") as log:
                log.write(f"preStop ended with {done.returncode}: {done.stdout}{done.stderr}\n")
        assert container.pid is not None
        os.kill(container.pid, signal.SIGTERM)
        try:
            container.process.wait(max(0.0, began + grace - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.kill(container.pid, signal.SIGKILL)
            container.process.wait(60)
            raise AssertionError(f"{container.name} had to be killed after {grace} s") from None
        return time.monotonic() - began

    def remove(self) -> None:
        for container in self.containers.values():
            # `unshare` ends with all that is in its namespaces.
            container.process.kill()
            container.process.wait(60)
        for place in (self.folder / "volumes").iterdir():
            subprocess.run(["umount", "-q", str(place)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)`, which Kubernetes fills in before anything is started."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def _main(process: subprocess.Popen[bytes], shared: bool) -> int | None:
    """The container's own process: the first of its namespace, or the first that the one of a shared one has made."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        for first in _children(process.pid):
            if not shared:
                return first
            words = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
            if PAUSE.encode() in words and words[0] == b"sh" and (found := _children(first)):
                return found[0]
        time.sleep(0.01)
    return None


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
