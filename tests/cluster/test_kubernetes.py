"""The manifest for Kubernetes: what its and KubeRay's schemas accept, what pods get, and what they may not do. Their
image is tested in `test_dockerfile.py`, both together in `test_container.py`.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app import kubernetes
from serve_app.cli import main
from serve_app.config import load_settings
from serve_app.ray_private import environment as env
from serve_app.ray_private.haproxy import SCRIPT, haproxy_files

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path(__file__).with_name("kuberay")
GROUPS = {"networking.k8s.io/v1": "networking.v1", "policy/v1": "policy.v1"}
ASKED = ["config", "gpu", "--models", "@cf/qwen/qwen3-0.6b", "--kubernetes", "registry.example/serve-app:1"]


@pytest.fixture(autouse=True)
def _empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "SERVE_APP_PORT", "SERVE_APP_HOST", "SERVE_APP_MODELS", "SERVE_APP_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    monkeypatch.setenv("SERVE_APP_API_KEY", "a-key-that-stays-where-it-is")


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*ASKED, *more]) == 0
    return capsys.readouterr().out


@pytest.fixture
def objects(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    found = yaml.safe_load_all(printed(capsys))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.fixture
def service(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    return objects["RayService", "serve-app"]


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def strict(schema: Any) -> Any:
    """``schema`` without room for unknown keys, which Kubernetes drops without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if made.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        # `apiVersion`, `kind` and `metadata` of the object itself are described elsewhere.
        made.setdefault("additionalProperties", False)
        if isinstance(made["properties"].get("metadata"), dict) and made["properties"]["metadata"] == {
            "type": "object"
        }:
            made["properties"]["metadata"] = {"type": "object"}
    return made


@pytest.fixture(scope="module")
def checker() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(strict(schema("rayservice-v1.7.0")))


def schema(name: str) -> Any:
    return json.loads(gzip.decompress((SCHEMAS / f"{name}.json.gz").read_bytes()))


@pytest.fixture(scope="module")
def kubernetes_accepts() -> Callable[[str, dict[str, Any]], list[str]]:
    """What Kubernetes says against an object, by the name of its definition."""
    definitions = strict(schema("kubernetes-v1.36"))["definitions"]

    def check(name: str, given: dict[str, Any]) -> list[str]:
        whole = {"$ref": f"#/definitions/io.k8s.api.{name}", "definitions": definitions}
        return problems(jsonschema.Draft202012Validator(whole), given)

    return check


def problems(checker: jsonschema.Draft202012Validator, service: dict[str, Any]) -> list[str]:
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in checker.iter_errors(service)]


def test_kuberay_accepts_it_and_ignores_nothing(
    service: dict[str, Any], checker: jsonschema.Draft202012Validator
) -> None:
    assert problems(checker, service) == []


def test_kubernetes_accepts_the_rest_and_ignores_nothing(
    objects: dict[tuple[str, str], dict[str, Any]], kubernetes_accepts: Callable[[str, dict[str, Any]], list[str]]
) -> None:
    others = [each for (kind, _), each in objects.items() if kind != "RayService"]
    assert {each["kind"] for each in others} == {"NetworkPolicy", "PodDisruptionBudget"}
    for each in others:
        assert kubernetes_accepts(f"{GROUPS[each['apiVersion']]}.{each['kind']}", each) == []
    # KubeRay's schema says nothing of a pod's labels.
    for pod in pods(objects["RayService", "serve-app"]):
        assert kubernetes_accepts("core.v1.PodTemplateSpec", pod) == []


@pytest.mark.parametrize(
    ("kind", "where", "value"),
    [
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("NetworkPolicy", ("spec", "ingress", 0, "ports", 0, "number"), 8000),
        ("NetworkPolicy", ("spec", "podSelector", "matchLabels", "a"), 1),
        ("NetworkPolicy", ("metadata", "label"), {}),
        ("PodDisruptionBudget", ("spec", "minAvailable"), None),
        ("PodDisruptionBudget", ("spec", "selector", "matchLabel"), {}),
    ],
)
def test_kubernetes_refuses_mistakes_in_it(
    objects: dict[tuple[str, str], dict[str, Any]],
    kubernetes_accepts: Callable[[str, dict[str, Any]], list[str]],
    kind: str,
    where: tuple[Any, ...],
    value: Any,
) -> None:
    wrong = copy.deepcopy(next(each for (found, _), each in objects.items() if found == kind))
    put(wrong, where, value)
    assert kubernetes_accepts(f"{GROUPS[wrong['apiVersion']]}.{kind}", wrong)


def put(given: dict[str, Any], where: tuple[Any, ...], value: Any) -> None:
    place = given
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "rayClusterConfig", "headGroupSpecs"), {}),
        (("spec", "rayClusterConfig", "autoscalerOptions", "idleTimeoutSeconds"), "15 minutes"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "container"), []),
    ],
)
def test_kuberay_refuses_mistakes_in_it(
    service: dict[str, Any], checker: jsonschema.Draft202012Validator, where: tuple[Any, ...], value: Any
) -> None:
    wrong = copy.deepcopy(service)
    put(wrong, where, value)
    assert problems(checker, wrong)


def test_ray_accepts_the_serve_config_in_it(service: dict[str, Any]) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert [a.args.get("model") for a in config.applications] == [None, "@cf/qwen/qwen3-0.6b"]


def test_every_pod_has_our_environment_and_finds_its_files(service: dict[str, Any]) -> None:
    state = Path(kubernetes.STATE)
    for pod in pods(service):
        [container] = pod["spec"]["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        for name, value in {**env.serving_env(), **haproxy_files(state / "ha")}.items():
            assert values[name] == value
        assert values["RAY_SERVE_HAPROXY_BINARY_PATH"] == f"{kubernetes.PROJECT}/{SCRIPT.relative_to(ROOT)}"
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        written = {values[name] for name in ("HOME", "SERVE_APP_HOME", "HF_HOME", "TRITON_CACHE_DIR")}
        assert mounted == {str(state), "/tmp", "/dev/shm"} and all(path.startswith(f"{state}/") for path in written)
        made = pod["spec"]["initContainers"][0]["command"]
        assert {f"{state}/ha", f"{state}/ray", f"{state}/user"} <= set(made) and "700" in made


def test_no_pod_may_do_more_than_it_needs(service: dict[str, Any]) -> None:
    for pod in pods(service):
        for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
            allowed = container["securityContext"]
            assert allowed["runAsNonRoot"] and allowed["readOnlyRootFilesystem"] and allowed["runAsUser"] == 1000
            # Left out, it is root's group.
            assert allowed["runAsGroup"] == 1000
            assert allowed["capabilities"] == {"drop": ["ALL"]} and not allowed["allowPrivilegeEscalation"]
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # Else `ray start` is the first process, and takes none of those that have ended.
        assert pod["spec"]["shareProcessNamespace"]
        for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
            # A namespace with a quota refuses pods of which a container says nothing.
            assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys() | {"cpu"}
    head, *workers = pods(service)
    assert head["spec"]["automountServiceAccountToken"]
    assert not any(worker["spec"]["automountServiceAccountToken"] for worker in workers)


def test_the_object_store_fits_into_the_pods_shared_memory(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        [volume] = [v for v in group["template"]["spec"]["volumes"] if v["name"] == "shared"]
        store = int(group["rayStartParams"]["object-store-memory"])
        assert volume["emptyDir"]["medium"] == "Memory"
        assert store < int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30


def test_secrets_are_named_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert "a-key-that-stays-where-it-is" not in text
    for variable in ("SERVE_APP_API_KEY", "SERVE_APP_DATABASE"):
        assert re.search(rf"name: {variable}\n\s+valueFrom:\n\s+secretKeyRef:", text)


def test_only_the_api_is_open_to_others(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    policy = objects["NetworkPolicy", "serve-app"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert [rule["ports"] for rule in policy["ingress"] if "from" not in rule] == [[{"port": 8000}]]
    labels = policy["podSelector"]["matchLabels"]
    service = objects["RayService", "serve-app"]
    for pod in pods(service):
        assert labels.items() <= pod["metadata"]["labels"].items()


def test_evictions_leave_a_worker_and_the_head_unless_a_redis_remembers(
    objects: dict[tuple[str, str], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    checker: jsonschema.Draft202012Validator,
) -> None:
    budgets = {name: each["spec"] for (kind, name), each in objects.items() if kind == "PodDisruptionBudget"}
    # A RayCluster has no scale, without which `maxUnavailable` allows nothing.
    assert all(set(budget) == {"minAvailable", "selector"} for budget in budgets.values())
    assert all(isinstance(budget["minAvailable"], int) for budget in budgets.values())
    service = objects["RayService", "serve-app"]
    least = {"head": 1} | {
        group["groupName"]: group["minReplicas"] for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    labelled = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pods(service)}
    for name, budget in budgets.items():
        kind = name.removeprefix("serve-app-")
        assert budget["selector"]["matchLabels"].items() <= labelled[kind]["metadata"]["labels"].items()
        assert (budget["minAvailable"] < least[kind]) == (kind != "head")
    assert set(budgets) == {"serve-app-head", "serve-app-cpu"}
    with_redis = {
        each["kind"] + each["metadata"]["name"]: each
        for each in yaml.safe_load_all(printed(capsys, "--redis", "redis:6379"))
    }
    assert "PodDisruptionBudgetserve-app-head" not in with_redis and "PodDisruptionBudgetserve-app-cpu" in with_redis
    service = with_redis["RayServiceserve-app"]
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    assert problems(checker, service) == []


def test_a_worker_drains_for_as_long_as_a_request_may_take(service: dict[str, Any]) -> None:
    head, *workers = pods(service)
    for pod in (head, *workers):
        [container] = pod["spec"]["containers"]
        [drain] = [v["value"] for v in container["env"] if v["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        # Then Ray ends what is left, for which it needs some seconds.
        assert pod["spec"]["terminationGracePeriodSeconds"] >= float(drain) + 30
        assert (float(drain) >= load_settings(profile="gpu").request_timeout_s) == (pod is not head)


def test_kuberays_services_find_our_pods(service: dict[str, Any]) -> None:
    """It gives pods labels of its own and looks for them; ours come after, and must leave them alone."""
    for pod in pods(service):
        labels = pod["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys()
        assert not any(name.startswith("ray.io/") for name in labels)
        assert {"name": "serve", "containerPort": 8000} in pod["spec"]["containers"][0]["ports"]


def test_workers_are_spread_and_out_of_the_service_while_their_proxy_does_not_answer(service: dict[str, Any]) -> None:
    head, *workers = pods(service)
    assert "readinessProbe" not in head["spec"]["containers"][0]
    for pod in workers:
        probe = pod["spec"]["containers"][0]["readinessProbe"]
        assert probe["httpGet"] == {"path": "/-/healthz", "port": "serve"}
        keys = {each["topologyKey"] for each in pod["spec"]["topologySpreadConstraints"]}
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for each in pod["spec"]["topologySpreadConstraints"]:
            assert each["labelSelector"]["matchLabels"] == pod["metadata"]["labels"]


@pytest.mark.parametrize("profile", ["local", "gpu"])
def test_others_than_the_pod_reach_the_api(profile: str) -> None:
    from serve_app.catalog.load import load_catalog

    [*_, service] = kubernetes.manifest(load_settings(profile=profile), load_catalog(), "image")
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]["host"] == "0.0.0.0"


def test_the_local_profile_asks_for_no_gpu() -> None:
    from serve_app.catalog.load import load_catalog

    settings = load_settings(profile="local")
    text = kubernetes.render(settings, load_catalog(), "image")
    assert "nvidia.com/gpu" not in text
