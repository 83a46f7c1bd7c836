"""The manifest for Kubernetes: what KubeRay's schema accepts, what pods get, what they may not do; and their image."""

from __future__ import annotations

import copy
import gzip
import json
import re
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
SCHEMA = Path(__file__).with_name("kuberay") / "rayservice-v1.7.0.json.gz"
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
    return jsonschema.Draft202012Validator(strict(json.loads(gzip.decompress(SCHEMA.read_bytes()))))


def problems(checker: jsonschema.Draft202012Validator, service: dict[str, Any]) -> list[str]:
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in checker.iter_errors(service)]


def test_kuberay_accepts_it_and_ignores_nothing(
    service: dict[str, Any], checker: jsonschema.Draft202012Validator
) -> None:
    assert problems(checker, service) == []


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
    place = wrong
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
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
            assert allowed["capabilities"] == {"drop": ["ALL"]} and not allowed["allowPrivilegeEscalation"]
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


def test_the_head_is_evicted_only_where_a_redis_remembers(
    objects: dict[tuple[str, str], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    checker: jsonschema.Draft202012Validator,
) -> None:
    assert objects["PodDisruptionBudget", "serve-app-head"]["spec"]["maxUnavailable"] == 0
    with_redis = {
        each["kind"] + each["metadata"]["name"]: each
        for each in yaml.safe_load_all(printed(capsys, "--redis", "redis:6379"))
    }
    assert with_redis["PodDisruptionBudgetserve-app-head"]["spec"]["maxUnavailable"] == 1
    service = with_redis["RayServiceserve-app"]
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    assert problems(checker, service) == []


def test_the_local_profile_asks_for_no_gpu() -> None:
    from serve_app.catalog.load import load_catalog

    settings = load_settings(profile="local")
    text = kubernetes.render(settings, load_catalog(), "image")
    assert "nvidia.com/gpu" not in text


def test_the_image_is_built_from_the_lock_and_runs_as_nobody() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert f"WORKDIR {kubernetes.PROJECT}\n" in text and f"\nUSER {kubernetes.USER}\n" in text
    assert "--require-hashes -r requirements/lock.txt" in text and "-r requirements/torch.txt" in text
    assert text.rindex("USER ") > text.rindex("RUN ")
    assert "wget" in text, "KubeRay's probes call it"
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "**/__pycache__"} <= set(ignored)
    assert not {"checkpoints", "serve_app", "deployments", "requirements", "training"} & set(ignored)
