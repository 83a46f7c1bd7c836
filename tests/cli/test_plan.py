import json

import pytest
import yaml

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import load_catalog
from serve_app.catalog.ranks import check_room
from serve_app.cli.program import main
from tests import tiny


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home"


def test_a_folder_is_planned_and_written_as_a_record(home, tmp_path, capsys):
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "llama")
    file = home / "models" / "tiny.yaml"
    assert main(["plan", str(folder), "--gpu", "h200", "--json", "--write", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["split"] == {"tensor": 1, "pipeline": 1, "experts_whole": False, "replicas": 1}
    assert found["kv_cache"]["streams"] > 1 and found["rates"]["decode"] > found["rates"]["single"] > 0
    record = load_catalog(home)["@cf/local/tiny"]
    assert record.serving["gpu"].stages["decode"].kv_cache_bytes <= found["kv_cache"]["bytes"]
    assert main(["plan", str(folder), "--write", str(file)]) == 1
    assert "exists" in capsys.readouterr().err


def test_a_split_is_written_and_can_be_started(home, tmp_path, capsys):
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "llama")
    file = home / "models" / "tiny.yaml"
    assert main(["plan", str(folder), "--count", "2", "--tensor", "2", "--write", str(file)]) == 0
    assert "tensor 2" in capsys.readouterr().out
    assert yaml.safe_load(file.read_text())["serving"]["gpu"]["decode"]["tensor_parallel"] == 2
    [(record, profile)] = load_catalog(home).started("gpu", ["@cf/local/tiny"])
    assert profile.stages["decode"].ranks == 2
    with pytest.raises(CatalogError, match="takes 2 GPUs, one for each of its 2 ranks, and there are 1"):
        check_room(record, profile, [1.0], file)


def test_what_ranks_with_whole_experts_hold_more_is_counted_and_written(home, tmp_path, capsys):
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "deepseek_v3")
    file = home / "models" / "tiny.yaml"
    asked = ["plan", str(folder), "--count", "2", "--tensor", "2", "--experts-whole", "--json"]
    found = []
    for more in ([], ["--experts-travel", "--expert-copies", "1", "--write", str(file)]):
        assert main([*asked, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["ranks"][0]["weights"])
    plain, more = found
    assert more["shared experts"] == 2 * plain["shared experts"]
    assert more["experts"] == plain["experts"] * 3 // 2  # three of four
    stage = load_catalog(home)["@cf/local/tiny"].serving["gpu"].stages["decode"]
    assert (stage.expert_parallel, stage.expert_dispatch, stage.expert_copies) == (2, "always", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-like-it"], "none of the configurations that ship"),
        (["llama-3.3-70b-instruct"], "does not fit 1 x h100"),
        (["llama-3.3-70b-instruct", "--count", "2", "--tensor", "3"], "takes 3 devices, and there are 2"),
        (["llama-3.3-70b-instruct", "--count", "8", "--prefill", "8"], "leaves none for answers"),
        (["llama-3.3-70b-instruct", "--count", "8", "--prefill", "1"], "does not fit 1 x h100"),
        (["gpt-oss-20b", "--expert-copies", "1"], "where ranks hold whole ones"),
        (["gpt-oss-20b", "--write", "x.yaml"], "a configuration without weights"),
    ],
)
def test_what_can_not_be_planned_is_said(home, capsys, arguments, said):
    assert main(["plan", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_prompts_get_a_stage_with_a_split_of_its_own(home, tmp_path, capsys):
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "llama")
    file = home / "models" / "tiny.yaml"
    arguments = ["plan", str(folder), "--count", "6", "--prefill", "2", "--tensor", "4", "--json", "--write", str(file)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"]["tensor"], found["prefill"]["split"]["replicas"]) == (4, 2)
    [(_, profile)] = load_catalog(home).started("gpu", ["@cf/local/tiny"])
    stages = profile.stages
    assert (stages["decode"].tensor_parallel, stages["prefill"].ranks, stages["prefill"].max_replicas) == (4, 1, 2)
    assert stages["prefill"].kv_cache_bytes and stages["prefill"].num_gpus == 1
    assert main(["plan", str(folder), "--count", "6", "--prefill", "2"]) == 0
    assert "prefill\n\n" in capsys.readouterr().out


def test_a_plan_for_this_machine(home, tmp_path, capsys):
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "llama")
    assert main(["plan", str(folder), "--cpu", "--memory", "4"]) == 0
    assert "1 x cpu, 4.00 GiB each" in capsys.readouterr().out
