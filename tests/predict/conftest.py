"""Tiny random checkpoints of small tasks, and a worker's work on them, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from serve_app.wire.predict import PredictCall
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec

PROCESSOR = {
    "do_resize": True, "size": {"height": 48, "width": 48}, "resample": 2, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_grad_enabled(True)


def saved(model: torch.nn.Module, folder: Path, processor: str = "") -> Path:
    """A checkpoint of ``model`` in ``folder``, with an image processor of that class."""
    model.save_pretrained(folder)
    if processor:
        said = {"image_processor_type": processor, **PROCESSOR}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Callable[[str, Path], PredictWork]:
    """``work(task, folder)``: a worker's work on the model there."""

    def made(task: str, folder: Path, **options: object) -> PredictWork:
        spec = WorkerSpec("@cf/test/model", "predictor", {"path": str(folder)}, str(tmp_path / "x.yaml"), str(tmp_path),
                          task=task, dtype="float32", max_batch_tokens=1024, **options)  # fmt: skip
        return PredictWork(spec, lambda step: None)

    return made


def call(*inputs: bytes, **options: object) -> PredictCall:
    return PredictCall(inputs, json.dumps(options).encode())
