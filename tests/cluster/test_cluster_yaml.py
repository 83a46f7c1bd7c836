"""cluster.yaml, and what other clouds have of it, pass Ray's own checks, carry our environment to every node and open
nothing to the world.
"""

import copy
import os
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app import clouds
from serve_app.cli.program import main
from serve_app.ray_private import environment as env
from serve_app.ray_private import haproxy

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "cluster.yaml").read_text()


@pytest.fixture(params=clouds.CLOUDS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return yaml.safe_load(clouds.render(request.param))


@pytest.fixture
def aws() -> dict[str, Any]:
    return yaml.safe_load(TEXT)


def start_commands(config: dict[str, Any]) -> list[str]:
    found = []
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        found += [command for command in config[key] if "ray start" in command]
    return found


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert set(prepared["available_node_types"]) == {"head", "gpu"}


@pytest.mark.parametrize(("where", "key"), [((), "max_workerz"), (("available_node_types", "gpu"), "min_wrokers")])
def test_ray_rejects_a_typo_in_it(config: dict[str, Any], where: tuple[str, ...], key: str) -> None:
    place = config
    for part in where:
        place = place[part]
    place[key] = 1
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_config(prepare_config(config))


def test_every_node_gets_exactly_our_environment(config: dict[str, Any]) -> None:
    writes = [command for command in config["setup_commands"] if "~/.serve_app_env" in command]
    assert len(writes) == 1
    values = dict(word.split("=", 1) for word in shlex.split(writes[0]) if re.match(r"RAY_\w+=", word))
    script = values.pop("RAY_SERVE_HAPROXY_BINARY_PATH").replace("$HOME/serve-app", str(ROOT))
    assert os.access(script, os.X_OK)
    # Where only the user of Ray can go.
    private = haproxy.haproxy_files(Path("$HOME/.ray/ha"))
    assert {name: values.pop(name) for name in private} == private
    assert any("chmod 700 ~/.ray" in command for command in config["setup_commands"])
    assert "--temp-dir=$HOME/.ray/tmp" in start_commands(config)[0]
    assert values == env.serving_env()
    commands = start_commands(config)
    assert len(commands) == 2
    assert all(command.startswith(". ~/.serve_app_env && ") for command in commands)


def test_the_token_reaches_every_node_unreadable_to_others(config: dict[str, Any]) -> None:
    assert config["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in config["setup_commands"])
    assert not re.search(r"RAY_AUTH_TOKEN=", TEXT)


def test_nothing_is_open_to_the_world(config: dict[str, Any], aws: dict[str, Any]) -> None:
    # Without a group of ours on every node type Ray makes one with SSH open to 0.0.0.0/0.
    for node in aws["available_node_types"].values():
        assert node["node_config"]["SecurityGroupIds"]
    assert "security_group" not in aws["provider"]
    without_comments = yaml.safe_dump(config)
    assert "0.0.0.0" not in without_comments and "::/0" not in without_comments
    head = start_commands(config)[0]
    assert "--dashboard-host=127.0.0.1" in head


def test_the_head_gets_what_ray_makes_machines_with(config: dict[str, Any]) -> None:
    """Ray's own defaults install it, and a list of ours stands in their place."""
    packages = {"aws": "boto3", "gcp": "google-api-python-client", "azure": "azure-mgmt-compute"}
    [command] = config["head_setup_commands"]
    assert re.search(
        rf"^~/serve-app/\.venv/bin/python -m pip install .*{packages[config['provider']['type']]}==", command
    )


def test_each_cloud_has_its_own_machines_and_the_same_of_all_else(config: dict[str, Any], aws: dict[str, Any]) -> None:
    own = {"provider", "auth", "available_node_types", "head_setup_commands"}
    assert set(config) == set(aws)
    assert {k: v for k, v in config.items() if k not in own} == {k: v for k, v in aws.items() if k not in own}
    if config["provider"]["type"] == "aws":
        return
    # Ray looks up what a type of machine has on AWS alone, and starts machines on others with packages of theirs.
    assert config["available_node_types"]["gpu"]["resources"]["GPU"] == 8
    assert config["provider"] != aws["provider"] and "==" in config["head_setup_commands"][0]


def test_they_are_printed_with_what_is_to_be_done_before(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for cloud in clouds.CLOUDS:
        assert main(["config", "gpu", "--cloud", cloud]) == 0
        printed[cloud] = capsys.readouterr().out
        comments = [line for line in printed[cloud].splitlines() if line.startswith("#")]
        assert [line[:6] for line in comments if re.match(r"#   \d\.", line)] == ["#   1.", "#   2.", "#   3."]
        assert max(map(len, printed[cloud].splitlines())) <= 400
    assert printed["aws"] == TEXT
    assert "security group" not in printed["gcp"] and "az login" in printed["azure"]


def test_a_cluster_yaml_that_has_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.yaml").write_text(TEXT.replace("provider:", "providers:"))
    monkeypatch.setattr(clouds, "PROJECT_ROOT", tmp_path)
    with pytest.raises(ValueError, match="provider"):
        clouds.render("gcp")


def test_the_head_runs_no_replicas_and_gpu_nodes_hold_the_cache(config: dict[str, Any]) -> None:
    assert config["head_node_type"] == "head"
    assert config["available_node_types"]["head"]["resources"]["CPU"] == 0
    gpu = config["available_node_types"]["gpu"]
    assert gpu["min_workers"] >= 1 and gpu["max_workers"] > gpu["min_workers"]
    worker = start_commands(config)[1]
    assert int(re.search(r"--object-store-memory=(\d+)", worker)[1]) >= 64 * 2**30


def test_nodes_install_the_locked_versions_and_not_our_machine(config: dict[str, Any]) -> None:
    assert any("make install" in command for command in config["setup_commands"])
    assert config["file_mounts"]["/home/ubuntu/serve-app"] == "."
    assert {".git", ".venv"} <= set(config["rsync_exclude"])
