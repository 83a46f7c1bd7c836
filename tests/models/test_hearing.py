"""The part of a model that hears: transformers' own features, for one sound and for several at once."""

from __future__ import annotations

import pytest
import torch

from serve_app.models import hearing as heard_by
from serve_app.predict.predictor import Place
from serve_app.predict.sounds import Sounds
from tests import hearing, tiny
from tests.variants import some


@pytest.fixture(scope="module", params=some(hearing.FAMILIES, "voxtral"))
def path(request, tmp_path_factory):
    return hearing.write(tmp_path_factory.mktemp("model") / request.param, request.param)


def test_features_are_transformers_own(path, monkeypatch):
    model, truth = tiny.load(path, optimise=True), hearing.Truth(path)
    # What hears stands beside the fused decoder.
    assert "fused_decoder" in model.report
    encoder = model.encoders["audio"]
    files = [file.data for file in hearing.files(path.name).values()]
    prepared = Sounds(Place(path), **encoder.options)
    try:
        items = [prepared.item(file) for file in files]
    finally:
        prepared.close()
    for file, item in zip(files, items, strict=True):
        theirs = truth.heard([file])["input_features"]
        torch.testing.assert_close(item.value["windows"], theirs, atol=1e-4, rtol=1e-4)
        assert item.size == theirs.shape[-1] * len(theirs) // 2 and item.kind == len(theirs)
    alike = [item.value for item in items if item.kind == 1]
    alone, together = [encoder([one])[0] for one in alike], encoder(alike)
    for one, both in zip(alone, together, strict=True):
        torch.testing.assert_close(one.features, both.features, atol=1e-5, rtol=1e-4)
        assert one.grid is None
    assert (len({len(one.features) for one in alone}) == 1) == (path.name == "voxtral")
    # A long sound is heard in several steps.
    longest = max(items, key=lambda item: item.size).value
    [whole] = encoder([longest])
    monkeypatch.setattr(heard_by, "WINDOWS", 2)
    torch.testing.assert_close(encoder([longest])[0].features, whole.features, atol=1e-5, rtol=1e-4)


def test_models_without_ears_have_no_encoder(tmp_path):
    assert tiny.load(tiny.write_checkpoint(tmp_path, "llama")).encoders == {}
