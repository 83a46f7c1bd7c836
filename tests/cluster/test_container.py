"""The image and the manifest together, as far as they go without docker and without Kubernetes.

The image is built from the Dockerfile's own lines (``container/image.py``). Packages are those that its locks name,
copied from the environment that runs the tests instead of fetched, which takes minutes and a network; the base image is
this machine's Debian and Python. Pods are made of the manifest as KubeRay makes them (``container/kuberay.py``) and run
as a kubelet runs them (``container/pods.py``): user 1000, no capabilities, a read-only root, and of places to write
only the volumes that the manifest names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app import kubernetes
from tests.cluster.container import image, outside
from tests.cluster.container.cluster import PATIENCE_S, Cluster, processes
from tests.cluster.container.image import Image
from tests.cluster.container.pods import Container, Pod
from tests.cluster.machines.network import Network, network, why_not
from tests.cluster.machines.serving import ASKED, ask, ask_all, body, record
from tests.cluster.machines.serving import MODEL as FAR
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MODEL, KEY, BUCKET = "@cf/pico/pico-instruct", "k" * 20, "files"
HEADERS = {"Authorization": f"Bearer {KEY}"}
STREAMED = 1500


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if reason := why_not():
        pytest.skip(reason)
    made = Path(tempfile.mkdtemp(prefix="image-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def built(folder: Path) -> Image:
    return image.build(ROOT, folder)


@pytest.fixture
def switch() -> Iterator[Network]:
    with network() as made:
        yield made


def manifest(built: Image, home: Path) -> list[dict[str, Any]]:
    """As an operator prints it for a model of his own, whose record he has put into the image. It needs no GPU."""
    text = yaml.safe_dump({**record(decode=1, prefill=1), "weights": {"path": "checkpoints/pico-instruct"}})
    for place in (built.root / kubernetes.PROJECT.lstrip("/") / "serve_app/catalog/models", home / "models"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "far.yaml").write_text(text)
        (place / "far.yaml").chmod(0o644)
    words = ["config", "gpu", "--models", FAR, "--kubernetes", "registry.example/serve-app:1"]
    environment = {"PATH": os.environ["PATH"], "SERVE_APP_HOME": str(home)}
    printed = subprocess.run(
        [Path(sys.executable).parent / "serve-app", *words], env=environment, capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(printed.stdout))


def writable(container: Container) -> set[str]:
    """Folders in which its user can make a file, without those beneath them."""
    program = """
import os
found = []
for folder, folders, _ in os.walk("/"):
    if folder in ("/proc", "/sys"):
        folders.clear()
        continue
    if os.access(folder, os.W_OK):
        try:
            path = os.path.join(folder, ".may-i")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            os.unlink(path)
        except OSError:
            continue
        found.append(folder)
        folders.clear()
print("\\n".join(found))
"""
    done = container.run("python", "-c", program, seconds=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def status(container: Container) -> dict[str, list[str]]:
    text = Path(f"/proc/{container.pid}/status").read_text()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in text.splitlines())}


def confined(pod: Pod, container: Container) -> None:
    told, user = status(container), str(kubernetes.USER)
    assert told["Uid"] == told["Gid"] == [user] * 4 and set(told["Groups"]) <= {user}
    assert all(int(told[name][0], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert told["NoNewPrivs"] == ["1"]
    mounted = {mount["mountPath"] for mount in container.spec["volumeMounts"]}
    assert mounted == {kubernetes.STATE, "/tmp", "/dev/shm"} | ({"/tmp/ray"} if pod.name == "head" else set())
    # /tmp/ray lies in /tmp.
    assert writable(container) == {kubernetes.STATE, "/tmp", "/dev/shm"}


def test_the_image_is_what_the_locks_say_and_nobody_can_change_it(built: Image) -> None:
    project = built.root / kubernetes.PROJECT.lstrip("/")
    names = {path.name.split("-")[0].lower() for path in project.glob(".venv/lib/*/site-packages/*.dist-info")}
    # What tests and lint need is not in it; what files on S3 and a PostgreSQL need is.
    assert {"ray", "torch", "transformers", "s3fs", "psycopg"} <= names and not {"pytest", "moto", "ruff"} & names
    assert not (project / "tests").exists() and not (project / ".git").exists()
    opened = [path for path in project.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    closed = [path for path in project.rglob("*") if not path.is_symlink() and not path.stat().st_mode & 0o004]
    assert opened == closed == []
    # Each module has its bytecode: without, every process would compile what it imports.
    missing = [
        path for path in project.rglob("*.py")
        if {"ray", "torch", "transformers", "serve_app", "deployments"} & set(path.relative_to(project).parts)
        and not list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
    ]  # fmt: skip
    assert len(missing) < 20, missing[:50]


def test_the_image_serves_by_itself(built: Image, switch: Network, folder: Path) -> None:
    """`docker run --read-only --tmpfs /tmp --shm-size 2g -v ...:/state`: its own command, as its own user."""
    recipe = built.recipe
    mounts = [{"name": name, "mountPath": path} for name, path in (("s", "/state"), ("t", "/tmp"), ("m", "/dev/shm"))]
    allowed = {
        "runAsUser": int(recipe.user), "runAsGroup": int(recipe.user), "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
    }  # fmt: skip
    variables = {"SERVE_APP_MODELS": MODEL, "SERVE_APP_API_KEY": KEY, "SERVE_APP_OBJECT_STORE_BYTES": "512MiB"}
    container = {
        "name": "server", "command": recipe.command, "securityContext": allowed, "volumeMounts": mounts,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }  # fmt: skip
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    volumes = [{"name": "s", "emptyDir": {}}, {"name": "t", "emptyDir": {}}, {"name": "m", **memory}]
    spec = {"containers": [container], "volumes": volumes}
    pod = Pod(built, {"metadata": {"name": "server"}, "spec": spec}, switch, {}, folder / "server", {})
    # A volume of docker's begins as the image's folder is: of the user alone.
    state = pod.folder / "volumes" / "s"
    shutil.copystat(built.root / "state", state)
    os.chown(state, int(recipe.user), int(recipe.user))
    try:
        server = pod.start(container)
        url = f"http://{pod.address}:{recipe.ports[0]}"

        def answers() -> str | None:
            assert server.running, server.log.read_text()[-4000:]
            return ask(url, MODEL, KEY, ASKED[0], 20)

        assert wait_for(answers, PATIENCE_S, 0.5)
        assert writable(server) == {"/state", "/tmp", "/dev/shm"}
        # docker stop gives ten seconds, and as many as are asked for.
        pod.end(server, 60)
        assert "Read-only file system" not in server.log.read_text()
    finally:
        pod.remove()


def test_the_manifests_pods_serve_and_are_evicted_without_a_cut(
    built: Image, switch: Network, folder: Path, postgres_server: Any
) -> None:
    database = postgres_server.create()
    with (
        outside.reachable(database, switch.address) as url,
        outside.bucket(switch.address, BUCKET) as s3,
    ):
        secrets = {
            "serve-app": {"api-key": KEY, "database": url, "files": f"s3://{BUCKET}/of-a-cluster"},
            "serve-app-ray": {"auth_token": "a" * 64},
            "serve-app-s3": s3,
        }
        cluster = Cluster(built, manifest(built, folder / "home"), switch, secrets, folder)
        try:
            cluster.start()
            wait_for(lambda: set(cluster.applications().values()) == {"RUNNING"}, PATIENCE_S, 0.5)
            for pod in cluster.pods:
                confined(pod, pod.main)
            [gateway] = cluster.holding("gateway:Gateway")
            cluster.ready(gateway)
            expected = ask_all(f"http://{gateway.address}:8000", FAR, KEY, 20)
            # The service sends clients to every pod that is ready, and KubeRay to the head if its proxy is well.
            ready = [pod for pod in cluster.pods[1:] if pod.probe(pod.main, "readiness")]
            assert httpx.get(f"http://{cluster.head.address}:8000/-/healthz", timeout=30).text == "success"
            for pod in {cluster.head.name: cluster.head, **{one.name: one for one in ready}}.values():
                assert ask_all(f"http://{pod.address}:8000", FAR, KEY, 20) == expected
            _files_lie_in_the_bucket(f"http://{gateway.address}:8000", s3)
            _no_stream_is_cut(cluster, gateway)
            # The head goes last, as KubeRay deletes a cluster.
            cluster.head.end(cluster.head.main, cluster.head.spec["terminationGracePeriodSeconds"])
            logs = "".join(path.read_text() for path in folder.glob("*/ray-*.log"))
            assert "Read-only file system" not in logs and "Permission denied" not in logs
        finally:
            cluster.remove()
            postgres_server.drop(database)


def _files_lie_in_the_bucket(url: str, s3: dict[str, str]) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body(FAR, ASKED[0], 5)}
    files = {"file": ("a.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    answer = httpx.post(f"{url}/v1/files", headers=HEADERS, files=files, timeout=120)
    assert answer.status_code == 200, answer.text
    assert outside.objects(s3, BUCKET)


def _no_stream_is_cut(cluster: Cluster, gateway: Pod) -> None:
    """The pod that holds a client's connection is evicted in the middle of a long answer."""
    began, texts = time.monotonic(), list[str]()
    url, asked = f"http://{gateway.address}:8000/v1/chat/completions", body(FAR, ASKED[1], STREAMED, stream=True)

    def read() -> tuple[int, bool]:
        """Of the stream: how many pieces it had, and whether it ended as it should."""
        ended = False
        with httpx.stream("POST", url, headers=HEADERS, json=asked, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    frame = json.loads(line[6:])
                    assert "error" not in frame, frame
                    texts.extend(c["delta"]["content"] for c in frame["choices"] if c["delta"].get("content"))
        return len(texts), ended

    grace = gateway.spec["terminationGracePeriodSeconds"]
    with ThreadPoolExecutor() as threads:
        stream = threads.submit(read)
        wait_for(lambda: len(texts) > 5 or stream.done(), PATIENCE_S)
        had = len(texts)
        assert not stream.done()
        seconds = gateway.end(gateway.main, grace)
        pieces, ended = stream.result(PATIENCE_S)
    assert ended and pieces > had
    print(json.dumps({"stream_s": time.monotonic() - began, "evicted_s": seconds, "pieces": [had, pieces]}))
    assert "did not finish draining" not in gateway.main.log.read_text()
    # Another pod has taken over.
    [other] = cluster.holding("gateway:Gateway")
    assert other is not gateway
    whole = wait_for(lambda: ask(f"http://{other.address}:8000", FAR, KEY, ASKED[1], STREAMED), PATIENCE_S, 0.5)
    assert "".join(texts) == whole
    # HAProxy has been started anew several times, and what it leaves behind has been taken.
    wait_for(lambda: not any(line.startswith("Z") for line in processes(other.main, "stat").splitlines()), PATIENCE_S)
