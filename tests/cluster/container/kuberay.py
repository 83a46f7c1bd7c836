"""The pods that KubeRay makes of a RayService, as far as a container sees it: its command, its variables, its volumes
and its probes.

Facts of KubeRay 1.7 (https://github.com/ray-project/kuberay, ray-operator/controllers/ray/common/pod.go and
controllers/ray/utils/constant.go, Apache-2.0). A container's own command, variables, mounts and probes win.
"""

from __future__ import annotations

import copy
from typing import Any

SERVICE, NAMESPACE = "serve-app-head-svc", "default"
HEAD_ADDRESS = f"{SERVICE}.{NAMESPACE}.svc.cluster.local"
GCS, AGENT, METRICS, DASHBOARD = 6379, 52365, 8080, 8265
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def number(quantity: str) -> int:
    """Of Kubernetes' quantities those that occur; parts of a processor count as one."""
    for unit, size in UNITS.items():
        if quantity.endswith(unit):
            return int(quantity.removesuffix(unit)) * size
    return -(-int(quantity.removesuffix("m")) // 1000) if quantity.endswith("m") else int(quantity)


def pod(service: dict[str, Any], group: dict[str, Any], role: str, name: str) -> dict[str, Any]:
    """``group``: the `headGroupSpec`, or one of the `workerGroupSpecs`."""
    cluster = service["spec"]["rayClusterConfig"]
    made: dict[str, Any] = copy.deepcopy(group["template"])
    spec = made["spec"]
    main = spec["containers"][0]
    start = _ray_start(group["rayStartParams"], main["resources"], role)
    if role == "head" and cluster.get("enableInTreeAutoscaling"):
        start = f"{start} --no-monitor"
        autoscaler = _autoscaler(main["image"], cluster)
        spec["containers"].append(autoscaler)
        spec["restartPolicy"] = "Never"
        spec["volumes"].append({"name": "ray-logs", "emptyDir": {}})
        for container in (main, autoscaler):
            container["volumeMounts"].append({"name": "ray-logs", "mountPath": "/tmp/ray"})
    _mount_shared_memory(spec, main)
    given = [*main.get("command", ()), *main.get("args", ())]
    assert not any("ray start" in word for word in given), "KubeRay would leave the command as it is"
    before = f"{' '.join(given)} && " if given else ""
    limit = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
    main["command"], main["args"] = ["/bin/bash", "-c", "--"], [f"{before}{limit}; {start}"]
    _variables(main, cluster, group, role, name)
    for container in spec.get("initContainers", ()):
        container["env"] = [*container.get("env", ()), _plain("FQ_RAY_IP", HEAD_ADDRESS)]
    if role == "worker":
        spec.setdefault("initContainers", []).append(_waits(main))
    _probes(main, role)
    made["metadata"] = {**made.get("metadata", {}), "name": name}
    return made


def _ray_start(given: dict[str, str], resources: dict[str, Any], role: str) -> str:
    options = {"metrics-export-port": str(METRICS), "dashboard-agent-listen-port": str(AGENT), "block": "true"}
    options |= {"dashboard-host": "0.0.0.0"} if role == "head" else {"address": f"{HEAD_ADDRESS}:{GCS}"}
    cpus = resources.get("limits", {}).get("cpu") or resources.get("requests", {}).get("cpu")
    if cpus:
        options["num-cpus"] = str(number(cpus))
    if memory := resources.get("limits", {}).get("memory"):
        options["memory"] = str(number(memory))
    options |= given
    words = [f"--{key}" if value == "true" else f"--{key}={value}" for key, value in sorted(options.items())]
    return " ".join(["ray start", *(["--head"] if role == "head" else []), *words])


def _autoscaler(image: str, cluster: dict[str, Any]) -> dict[str, Any]:
    command = "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) --cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
    options = cluster.get("autoscalerOptions", {})
    taken = {key: options[key] for key in ("resources", "securityContext", "image") if key in options}
    made = {
        "name": "autoscaler",
        "image": image,
        "command": ["/bin/bash", "-c", "--"],
        "args": [command],
        "env": [
            _plain("RAY_CLUSTER_NAME", "serve-app"), _plain("RAY_CLUSTER_NAMESPACE", NAMESPACE),
            _plain("KUBERAY_CRD_VER", "v1"), _plain("RAY_HEAD_POD_NAME", "head"),
        ],
        "volumeMounts": copy.deepcopy(options.get("volumeMounts", [])),
        **taken,
    }  # fmt: skip
    _token(made, cluster)
    made["env"] += options.get("env", [])
    return made


def _mount_shared_memory(spec: dict[str, Any], main: dict[str, Any]) -> None:
    if all(mount["mountPath"] != "/dev/shm" for mount in main["volumeMounts"]):
        size = main["resources"].get("requests", {}).get("memory")
        spec["volumes"].append({"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        main["volumeMounts"].append({"name": "shared-mem", "mountPath": "/dev/shm"})


def _variables(main: dict[str, Any], cluster: dict[str, Any], group: dict[str, Any], role: str, name: str) -> None:
    ours = {each["name"] for each in main["env"]}
    head = {"RAY_ADDRESS": f"127.0.0.1:{GCS}", "RAY_enable_autoscaler_v2": "true"}
    worker = {"RAY_ADDRESS": f"{HEAD_ADDRESS}:{GCS}", "FQ_RAY_IP": HEAD_ADDRESS, "RAY_IP": SERVICE}
    values = {
        "RAY_CLUSTER_NAME": "serve-app", "RAY_CLUSTER_NAMESPACE": NAMESPACE, "RAY_CLOUD_INSTANCE_ID": name,
        "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"), "RAY_PORT": str(GCS),
        "RAY_timeout_ms_task_wait_for_death_info": "0", "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5", "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1", **(head if role == "head" else worker),
    }  # fmt: skip
    main["env"] += [_plain(key, value) for key, value in values.items() if key not in ours]
    _token(main, cluster)


def _token(container: dict[str, Any], cluster: dict[str, Any]) -> None:
    options = cluster["authOptions"]
    assert options["mode"] == "token"
    ours = {each["name"] for each in container["env"]}
    secret = {"valueFrom": {"secretKeyRef": {"name": options["secretName"], "key": "auth_token"}}}
    added = [_plain("RAY_AUTH_MODE", "token"), {"name": "RAY_AUTH_TOKEN", **secret}]
    container["env"] += [each for each in added if each["name"] not in ours]


def _waits(main: dict[str, Any]) -> dict[str, Any]:
    """What a worker does before all else: it waits for the head."""
    script = f"until ray health-check --address {HEAD_ADDRESS}:{GCS} > /dev/null 2>&1; do sleep 5; done"
    kept = ("image", "securityContext", "env", "envFrom", "volumeMounts")
    return {
        "name": "wait-gcs-ready",
        "command": ["/bin/bash", "-c", "--"],
        "args": [script],
        **copy.deepcopy({key: main[key] for key in kept if key in main and key != "envFrom"}),
    }


def _probes(main: dict[str, Any], role: str) -> None:
    """Of a Ray since 2.53: both ask its agent, and a worker's readiness the HTTP proxy as well."""
    asks: dict[str, Any] = {"httpGet": {"path": "/api/healthz", "port": AGENT}}
    timing = {"timeoutSeconds": 5 if role == "head" else 2, "periodSeconds": 5, "successThreshold": 1}
    alive = {**asks, **timing, "initialDelaySeconds": 30, "failureThreshold": 120}
    ready: dict[str, Any] = {**asks, **timing, "initialDelaySeconds": 10, "failureThreshold": 10}
    if role == "worker":
        [port] = [each["containerPort"] for each in main["ports"] if each["name"] == "serve"]
        wget = "wget --tries 1 -T {} -q -O- http://localhost:{}/{} | grep success"
        both = [wget.format(2, AGENT, "api/local_raylet_healthz"), wget.format(10, port, "-/healthz")]
        del ready["httpGet"]
        ready |= {"exec": {"command": ["bash", "-c", " && ".join(both)]}, "failureThreshold": 1}
    main.setdefault("livenessProbe", alive)
    main.setdefault("readinessProbe", ready)


def _plain(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}
