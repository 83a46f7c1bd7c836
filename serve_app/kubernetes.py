"""A cluster on Kubernetes: the manifest that ``serve-app config PROFILE --kubernetes IMAGE`` prints.

One ``RayService`` of KubeRay (1.5 or later) with the Serve config of the profile, and what belongs to it: a network
policy and two disruption budgets. Secrets are named, never printed. A test compares the manifest with KubeRay's schema.

Fields: https://github.com/ray-project/kuberay, ray-operator/apis/ray/v1. KubeRay writes the command of each Ray
container, and the probes that it has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.catalog.load import Catalog
from serve_app.config import Settings
from serve_app.ray_private.environment import serving_env
from serve_app.ray_private.haproxy import haproxy_files, haproxy_of
from serve_app.serve_config import deploy_config

NAME = "serve-app"
PROJECT = "/srv/serve-app"  # in the image, as the Dockerfile lays it out
STATE = "/state"  # short: a socket's path has at most 107 bytes
USER = 1000

_HEADER = """\
# Made by `serve-app config {profile} --kubernetes {image}`; do not edit, make it again.
# It needs KubeRay 1.5 or later, and these secrets, which it names and does not hold:
#   kubectl create secret generic serve-app --from-literal=api-key=... \\
#     --from-literal=database=postgresql+psycopg://USER:PASSWORD@HOST/NAME --from-literal=files=s3://BUCKET/PREFIX
#   kubectl create secret generic serve-app-ray --from-literal=auth_token="$(openssl rand -hex 32)"
#   kubectl create secret generic serve-app-s3 \\
#     --from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=...
# The last may be left out where pods have a role of their own; a key `hf-token` of the first fetches gated models.
# The API answers at service serve-app-serve-svc, port {port}.
"""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Pods of one kind. ``memory`` and ``shared`` (Ray's object store, where the shared K/V cache lies) in GiB."""

    name: str
    least: int
    most: int
    cpus: int
    memory: int
    shared: int
    gpus: int = 0


HEAD = Nodes("head", 1, 1, cpus=2, memory=8, shared=2)
# Gateways, encoders on CPUs, batches. Two, so that one may be evicted.
CPU_NODES = Nodes("cpu", 2, 8, cpus=8, memory=32, shared=4)
GPU_NODES = Nodes("gpu", 0, 8, cpus=8, memory=96, shared=48, gpus=1)
# Not `name`: KubeRay's head service looks for its own value there (BuildHeadServiceForRayService in common/service.go).
OURS = {"app.kubernetes.io/part-of": NAME}
# Seconds that a pod has to end after it has drained.
LAST_S = 60


def manifest(settings: Settings, catalog: Catalog, image: str, redis: str | None = None) -> list[dict[str, Any]]:
    """The objects, in the order in which they are applied.

    ``redis`` (HOST:PORT, its password in the secret ``serve-app-redis``) keeps what Ray's head knows: it may be lost.
    """
    kinds = [CPU_NODES, GPU_NODES] if settings.profile == "gpu" else [CPU_NODES]
    cluster: dict[str, Any] = {
        "rayVersion": ray_version(),
        "authOptions": {"mode": "token", "secretName": f"{NAME}-ray"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": 900,
            "securityContext": _container_security(),
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "state", "mountPath": STATE}],
        },
        "headGroupSpec": {
            "rayStartParams": {
                # Replicas never compete with the controller and the cluster's own bookkeeping.
                "num-cpus": "0",
                # KubeRay's operator deploys through it. It asks for the token; the network policy keeps others away.
                "dashboard-host": "0.0.0.0",
                **_start(HEAD),
            },
            "template": _pod(HEAD, image, settings),
        },
        "workerGroupSpecs": [
            {
                "groupName": kind.name,
                "replicas": kind.least,
                "minReplicas": kind.least,
                "maxReplicas": kind.most,
                "rayStartParams": _start(kind),
                "template": _pod(kind, image, settings),
            }
            for kind in kinds
        ],
    }
    if redis:
        password = {"valueFrom": {"secretKeyRef": {"name": f"{NAME}-redis", "key": "password"}}}
        cluster["gcsFaultToleranceOptions"] = {"redisAddress": redis, "redisPassword": password}
    serve = deploy_config(settings, catalog)
    if settings.is_loopback:
        # Of a pod, which nothing but the pod reaches.
        serve["http_options"]["host"] = "0.0.0.0"
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": {
            # The old cluster ends this long after the new one has taken over: as long as a request may take.
            "rayClusterDeletionDelaySeconds": int(settings.request_timeout_s),
            "serveConfigV2": yaml.safe_dump(serve, sort_keys=False, width=120),
            "rayClusterConfig": cluster,
        },
    }
    budgets = [_budget(CPU_NODES, CPU_NODES.least - 1)]
    if not redis:
        # A lost head is a lost cluster: nobody evicts it unasked, nor one of the two that there are during an upgrade.
        budgets.insert(0, _budget(HEAD, 2))
    return [_network_policy(settings.port), *budgets, service]


def render(settings: Settings, catalog: Catalog, image: str, redis: str | None = None) -> str:
    """:func:`manifest` as YAML documents."""
    objects = manifest(settings, catalog, image, redis)
    body = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)
    return _HEADER.format(profile=settings.profile, image=image, port=settings.port) + "---\n" + body


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no anchors, which readers of manifests stumble over."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def ray_version() -> str:
    """Of this installation, which the image's lock has as well."""
    from importlib.metadata import version

    return version("ray")


def _start(kind: Nodes) -> dict[str, str]:
    return {"temp-dir": f"{STATE}/ray", "object-store-memory": str(kind.shared * 2**30)}


def _container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
    }


def _secret(variable: str, key: str, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": NAME, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _environment(drain_s: int) -> list[dict[str, Any]]:
    values = {
        **serving_env(),
        **haproxy_files(Path(STATE) / "ha"),
        **haproxy_of(Path(PROJECT)),
        "HOME": f"{STATE}/user",
        "SERVE_APP_HOME": f"{STATE}/user/serve-app",
        "HF_HOME": f"{STATE}/weights",
        "TRITON_CACHE_DIR": f"{STATE}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{STATE}/inductor",
        # After SIGTERM: other nodes get the replicas first, and requests end. Idle nodes leave at once.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_s),
    }
    given = [_secret("SERVE_APP_API_KEY", "api-key"), _secret("SERVE_APP_DATABASE", "database")]
    given += [_secret("SERVE_APP_FILES", "files", optional=True), _secret("HF_TOKEN", "hf-token", optional=True)]
    return [{"name": name, "value": value} for name, value in values.items()] + given


def _pod(kind: Nodes, image: str, settings: Settings) -> dict[str, Any]:
    role = "head" if kind is HEAD else "worker"
    # A worker's requests may take as long as that; nobody takes over from a head.
    drain_s = 10 if kind is HEAD else int(settings.request_timeout_s)
    labels = _labels(kind)
    mounts = [
        {"name": "state", "mountPath": STATE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shared", "mountPath": "/dev/shm"},
    ]
    requests: dict[str, Any] = {"cpu": str(kind.cpus), "memory": f"{kind.memory}Gi"}
    limits: dict[str, Any] = {"memory": f"{kind.memory}Gi"}
    if kind.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(kind.gpus)
    container: dict[str, Any] = {
        "name": f"ray-{role}",
        "image": image,
        "env": _environment(drain_s),
        "envFrom": [{"secretRef": {"name": f"{NAME}-s3", "optional": True}}],
        "ports": [{"name": "serve", "containerPort": settings.port}],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": _container_security(),
        "volumeMounts": mounts,
    }
    if kind is not HEAD:
        # KubeRay's own runs a shell and two clients in the container, and takes a busy node out after 2 s.
        container["readinessProbe"] = {
            "httpGet": {"path": "/-/healthz", "port": "serve"},
            "initialDelaySeconds": 10,
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        }
    # Where only this user may look: HAProxy's sockets, Ray's, and keys.
    made = {
        "name": "folders",
        "image": image,
        "command": ["install", "-d", "-m", "700", *(f"{STATE}/{name}" for name in ("ha", "ray", "user", "weights"))],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": _container_security(),
        "volumeMounts": mounts[:1],
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": role == "head",  # the autoscaler asks for pods
        # Kubernetes' own first process takes processes that have ended; `ray start` would leave some at each reload.
        "shareProcessNamespace": True,
        "securityContext": {"fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": drain_s + LAST_S,
        "initContainers": [made],
        "containers": [container],
        "volumes": [
            {"name": "state", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": f"{kind.shared + 1}Gi"}},
        ],
    }
    if kind is not HEAD:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
            for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
        ]
    if kind.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels}, "spec": spec}


def _labels(kind: Nodes) -> dict[str, str]:
    return {**OURS, "app.kubernetes.io/component": kind.name}


def _network_policy(port: int) -> dict[str, Any]:
    """The API's port for everybody, the head's dashboard for KubeRay's operator, everything between our own pods."""
    ours = {"podSelector": {"matchLabels": OURS}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {
            **ours,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": port}]},
                {"from": [operator], "ports": [{"port": 8265}]},
                {"from": [ours]},
            ],
        },
    }


def _budget(kind: Nodes, least: int) -> dict[str, Any]:
    """Not `maxUnavailable`, which needs a controller that has a scale: a RayCluster has none, so that every eviction
    would be refused (https://github.com/ray-project/kuberay/issues/2662).
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{NAME}-{kind.name}"},
        "spec": {"minAvailable": least, "selector": {"matchLabels": _labels(kind)}},
    }
