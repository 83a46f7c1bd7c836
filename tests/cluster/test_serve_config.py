"""serve_config/*.yaml: what the catalogue renders to, what Ray's own schema accepts, what the builders can build."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.catalog.load import load_catalog
from serve_app.cli import main
from serve_app.config import load_settings
from serve_app.serve_config import deploy_config
from serve_app.tasks.model import application_name
from tests.ray_private.names import built_deployments

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("local", "gpu")


@pytest.fixture(autouse=True)
def _empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "SERVE_APP_PORT", "SERVE_APP_HOST", "SERVE_APP_MODELS", "SERVE_APP_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))


def shipped(profile: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "serve_config" / f"{profile}.yaml").read_text())


@pytest.mark.parametrize("profile", PROFILES)
def test_the_shipped_file_is_what_the_command_prints(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", profile]) == 0
    assert capsys.readouterr().out == (ROOT / "serve_config" / f"{profile}.yaml").read_text(), (
        f"run `serve-app config {profile} > serve_config/{profile}.yaml` with an empty SERVE_APP_HOME"
    )


@pytest.mark.parametrize("profile", PROFILES)
def test_ray_accepts_it_and_ignores_nothing(profile: str) -> None:
    config = shipped(profile)
    accepted = ServeDeploySchema.model_validate(config)
    # Ray's schema lets unknown keys pass without a word; a misspelt one would simply not count.
    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert set(config["http_options"]) <= set(type(accepted.http_options).model_fields)
    for raw, application in zip(config["applications"], accepted.applications, strict=True):
        assert set(raw) <= set(type(application).model_fields)
        assert application.args == raw["args"]
    assert [a.name for a in accepted.applications if a.route_prefix is not None] == ["gateway"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_model_of_the_profile_has_an_application(profile: str) -> None:
    expected = {record.id for record, _ in load_catalog().started(profile)}  # type: ignore[arg-type]
    applications = [a for a in shipped(profile)["applications"] if "model" in a["args"]]
    assert {a["args"]["model"] for a in applications} == expected
    assert all(a["name"] == application_name(a["args"]["model"]) for a in applications)


def test_only_a_cluster_listens_beyond_the_machine() -> None:
    assert shipped("local")["http_options"]["host"] == "127.0.0.1"
    assert shipped("gpu")["http_options"]["host"] == "0.0.0.0"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_application_builds(profile: str) -> None:
    catalog = load_catalog()
    for application in shipped(profile)["applications"]:
        deployments = built_deployments(application)
        if application["name"] == "gateway":
            assert set(deployments) == {"Gateway", "Batch"}
            continue
        serving = catalog[application["args"]["model"]].serving[profile]  # type: ignore[index]
        stages = {stage.capitalize() for stage in serving.stages}
        assert set(deployments) == stages | ({"Text"} if "Decode" in stages else set())
        for stage, size in serving.stages.items():
            limits = deployments[stage.capitalize()]._deployment_config.autoscaling_config
            assert (limits.min_replicas, limits.max_replicas) == (size.min_replicas, size.max_replicas)


@pytest.mark.parametrize(
    ("profile", "gateways", "limits"),
    [("local", "1", (1, 1)), ("local", "2", (2, 2)), ("gpu", "1", (1, 16)), ("gpu", "20", (20, 20))],
)
def test_there_are_as_many_gateways_as_are_asked_for(profile, gateways, limits, monkeypatch) -> None:
    monkeypatch.setenv("SERVE_APP_GATEWAYS", gateways)
    [application] = [a for a in shipped(profile)["applications"] if a["name"] == "gateway"]
    found = built_deployments(application)["Gateway"]._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas) == limits


def test_some_models_only_and_the_gateway_knows_which() -> None:
    wanted = ["@cf/qwen/qwen3-0.6b", "@cf/baai/bge-small-en-v1.5"]
    settings = load_settings(profile="gpu", models=",".join(wanted))
    config = deploy_config(settings, load_catalog(settings.home))
    ServeDeploySchema.model_validate(config)
    gateway, *models = config["applications"]
    assert [a["args"]["model"] for a in models] == wanted
    assert gateway["runtime_env"] == {"env_vars": {"SERVE_APP_MODELS": ",".join(wanted)}}


def test_applications_run_the_project_of_another_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "local", "--code", "/opt/next", "--models", "@cf/pico/pico-instruct"]) == 0
    told = capsys.readouterr().out
    assert "&id" not in told  # each can be changed by itself
    applications = yaml.safe_load(told)["applications"]
    assert len(applications) == 2
    assert {a["runtime_env"]["env_vars"]["PYTHONPATH"] for a in applications} == {"/opt/next"}
    assert applications[0]["runtime_env"]["env_vars"]["SERVE_APP_MODELS"] == "@cf/pico/pico-instruct"
    assert main(["config", "local", "--code", "next"]) == 2
    assert "give its whole path" in capsys.readouterr().err


def test_a_model_that_the_profile_cannot_start_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "local", "--models", "@cf/qwen/qwen3-0.6b"]) == 2
    assert "has no local profile" in capsys.readouterr().err


def test_it_holds_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_API_KEY", "a-key-that-must-not-be-printed")
    assert main(["config", "gpu"]) == 0
    assert "must-not-be-printed" not in capsys.readouterr().out


@pytest.mark.slow
def test_serve_build_accepts_the_bound_applications(tmp_path: Path) -> None:
    """`serve build` in a process of its own, as a person would run it."""
    out = tmp_path / "built.yaml"
    names = ["serve_app.bound:gateway", "serve_app.bound:cf__pico__pico_instruct"]
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "build", *names, "-o", str(out)]
    environment = {**os.environ, "SERVE_APP_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    built = yaml.safe_load(out.read_text())
    deployments = [d["name"] for application in built["applications"] for d in application["deployments"]]
    assert sorted(deployments) == ["Batch", "Decode", "Draft", "Gateway", "Prefill", "Text"]
