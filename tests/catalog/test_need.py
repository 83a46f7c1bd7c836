"""What workers take at least, and which models can never be up within a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments import blueprint
from deployments.blueprint import SHARED_GPU, Blueprint
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.catalog.need import file_bytes, of_stage, unfit
from serve_app.catalog.records import ModelRecord, Weights
from serve_app.config import ConfigError, load_settings
from serve_app.serving import _check_memory

MIB = 1 << 20
RECORD = {
    "task": "text-generation", "description": "Large.", "created_at": "2026-01-31",
    "weights": {"path": str(PROJECT_ROOT / "checkpoints" / "pico-vision")},
}  # fmt: skip
SOURCE = PROJECT_ROOT / "x.yaml"


def started(name: str, *, profile: str = "local", **stages):
    record = ModelRecord.model_validate({"id": f"@cf/me/{name}", **RECORD, "serving": {profile: stages}})
    return record, record.serving[profile], SOURCE


SLEEPS, STAYS = {"min_replicas": 0}, {"min_replicas": 1}


def test_a_cache_and_files_count(tmp_path) -> None:
    record, profile, _ = started("a", decode={**SLEEPS, "kv_cache_bytes": 64 * MIB})
    need = of_stage(record, "decode", profile.stages["decode"], tmp_path, SOURCE)
    files = file_bytes(record.weights, tmp_path, SOURCE)
    assert files > MIB and need.least < need.likely and need.grows > 64 * MIB
    two = profile.stages["decode"].model_copy(update={"tensor_parallel": 2})
    assert of_stage(record, "decode", two, tmp_path, SOURCE).least > need.least


def test_weights_of_a_hub_count_where_they_lie(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    weights = Weights(repo="me/large")
    assert file_bytes(weights, tmp_path, SOURCE) is None
    folder = tmp_path / "models--me--large"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "model.safetensors").write_bytes(bytes(1000))
    assert file_bytes(weights, tmp_path, SOURCE) == 1000


def test_who_can_never_be_up_is_named(tmp_path) -> None:
    small = started("small", decode={**SLEEPS, "kv_cache_bytes": 8 * MIB})
    large = started("large", decode={**SLEEPS, "kv_cache_bytes": 8 << 30})
    kept = started("kept", decode={**STAYS, "kv_cache_bytes": 8 * MIB})
    assert unfit([small, kept], tmp_path, 400 * MIB) == {}
    [(model, why)] = unfit([small, large, kept], tmp_path, 400 * MIB).items()
    assert model == large[0].id and "400 MiB" in why and "beside @cf/me/kept" in why and "MEMORY_BUDGET" in why
    assert set(unfit([small, kept], tmp_path, 150 * MIB)) == {"@cf/me/small"}
    assert set(unfit([small, kept], tmp_path, 50 * MIB)) == {"@cf/me/kept"}
    # Answers do not need it, and a GPU's memory is not the machine's.
    without = started("other", decode=SLEEPS, prefill={**SLEEPS, "kv_cache_bytes": 8 << 30})
    gpu = started("gpu", profile="gpu", decode={**SLEEPS, "num_gpus": 0.5, "kv_cache_bytes": 8 << 30})
    assert unfit([without, gpu], tmp_path, 400 * MIB) == {}


def test_a_start_that_can_never_be_ends_with_the_reason(tmp_path, capsys) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_MEMORY_BUDGET": "50MiB"})
    assert settings.memory_budget == 50 * MIB

    class Found:
        def __init__(self, *models) -> None:
            self.models = models

        def started(self, profile, only):
            return [(record, profile) for record, profile, _ in self.models]

        def source(self, model) -> Path:
            return SOURCE

    with pytest.raises(ConfigError, match="@cf/me/kept.*50 MiB.*raise SERVE_APP_MEMORY_BUDGET"):
        _check_memory(settings, Found(started("kept", decode=STAYS)))
    _check_memory(settings, Found(started("sleeps", decode=SLEEPS)))
    assert "warning: @cf/me/sleeps" in capsys.readouterr().err


def test_on_one_gpu_shares_take_turns(tmp_path, monkeypatch) -> None:
    settings = load_settings(
        {"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_MEMORY_BUDGET": "1GiB", "SERVE_APP_PROFILE": "gpu"}
    )
    monkeypatch.setattr(blueprint, "_one_gpu", lambda: True)
    for stage, gpus, turn in (
        ({**SLEEPS, "num_gpus": 0.5}, SHARED_GPU, 0.5),
        ({**STAYS, "num_gpus": 0.5}, 0.5, 0.5),
        ({**SLEEPS, "num_gpus": 1, "tensor_parallel": 2}, 1, 0.0),
        (SLEEPS, 0, 0.0),
    ):
        record, profile, source = started("a", profile="gpu", decode=stage)
        model = Blueprint(record, profile, settings, source)
        spec = model.spec("decode")
        assert (model.gpus("decode"), spec.gpu_turn) == (gpus, turn)
        assert spec.may_sleep is (stage["min_replicas"] == 0) and spec.memory_budget == 1 << 30
        # What the worker takes of the GPU is the record's share whatever Ray is told.
        assert spec.gpu_share == pytest.approx(0.9 * min(1.0, stage.get("num_gpus") or 1.0))
        without = Blueprint(record, profile, settings.model_copy(update={"memory_budget": None}), source)
        assert without.gpus("decode") == stage.get("num_gpus", 0) and not without.spec("decode").may_sleep
    monkeypatch.setattr(blueprint, "_one_gpu", lambda: False)
    record, profile, source = started("a", profile="gpu", decode={**SLEEPS, "num_gpus": 0.5})
    assert Blueprint(record, profile, settings, source).gpus("decode") == 0.5
