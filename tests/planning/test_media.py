"""What a plan says that encoding takes agrees with what an encoder then allocates: its tensors are counted from the
first operator to the last."""

from __future__ import annotations

import json

import pytest
import torch

from serve_app.models.encoding import encodings, read_settings
from serve_app.models.media import HELD_FILES, KEPT_BYTES
from serve_app.models.peak import Living
from serve_app.planning.described import full_config, without_weights
from serve_app.planning.devices import GPUS, cpu
from serve_app.planning.plan import DoesNotFit, ServingTarget, make_plan, to_json
from serve_app.planning.ranks import Split
from serve_app.planning.say import said
from serve_app.planning.source import plan_model, published
from serve_app.planning.tensors import read_headers
from serve_app.predict.pictures import Pictures
from serve_app.predict.predictor import Place
from serve_app.predict.sounds import Sounds
from tests import hearing, sight, tiny

CONTEXT = sight.TEXT["max_position_embeddings"]
# Of a batch: tiny models have tiny pictures.
BUDGET = 64
# In every run; the others are like one of these.
QUICK = ("llava", "qwen2_audio")
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*sight.FAMILIES, *hearing.FAMILIES)
]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def counted(encoder, files):
    """Bytes at the peak while ``files`` are encoded together."""
    module = encoder.module
    with torch.no_grad(), Living([*module.parameters(), *module.buffers()]) as living:
        for tensor in (tensor for file in files for tensor in file.values()):
            living.count(tensor)
        # Outside of inference mode, in which operators are not seen one by one.
        type(encoder).__call__.__wrapped__(encoder, files)
    return living.peak


@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_takes_what_is_planned(one_thread, tmp_path, family):
    medium = "image" if family in sight.FAMILIES else "audio"
    folder = (sight if medium == "image" else hearing).write(tmp_path / family, family)
    encoder = tiny.load(folder).encoders[medium]
    if medium == "image":
        reader, file = (
            Pictures(Place(folder), **encoder.options),
            sight.picture(256, 224 if family in sight.TURNING else 256),
        )
    else:
        # As long as the context allows, where there is no other bound.
        one = family == "qwen2_audio"
        seconds = 1 if one else CONTEXT // hearing.EACH * hearing.WINDOW[family]
        reader, file = Sounds(Place(folder), **encoder.options), hearing.sound(seconds)
    try:
        item = reader.item(file)
    finally:
        reader.close()
    config = config_of(folder)
    module = without_weights(config, full_config(config), "float32")
    planned = encodings(module, read_settings(folder), CONTEXT, BUDGET)[medium]
    files = [{name: tensor.clone() for name, tensor in item.value.items()} for _ in range(planned.count)]
    # Some processors tell a number more.
    assert planned.prepared == pytest.approx(sum(tensor.nbytes for tensor in item.value.values()), rel=0.001)
    assert planned.count == 1 or (planned.count - 1) * item.size < BUDGET
    found = encoder(files[:1])[0].features
    assert (planned.features, planned.places) == (found.nbytes, len(found))
    assert planned.peak == pytest.approx(counted(encoder, files), rel=0.02)


def test_the_first_rank_has_what_sees_and_room_for_encoding(tmp_path):
    folder = sight.write(tmp_path / "mllama", "mllama")
    model = plan_model("x", config_of(folder), read_headers(folder), item=2, folder=folder)
    [encoding] = model.media.values()
    device = GPUS["h100"]
    plan = make_plan(model, ServingTarget(device), Split(2))
    [rank] = plan.ranks
    assert rank.weights["vision"] == model.by_role()["vision"]
    held = KEPT_BYTES + max(KEPT_BYTES, HELD_FILES * encoding.features)
    assert rank.media == {"pictures, encoding": encoding.peak, "pictures, features": held}
    assert rank.weight_bytes + rank.activations + rank.media_bytes + device.reserve + plan.left[0] == plan.usable
    assert "pictures, encoding" in said(plan) and to_json(plan)["ranks"][0]["media"] == rank.media
    stages = make_plan(model, ServingTarget(device), Split(1, 2)).ranks
    assert stages[0].media and not stages[1].media
    with pytest.raises(DoesNotFit, match="GiB for pictures and sounds and"):
        make_plan(model, ServingTarget(cpu(1 << 28)), Split())


@pytest.mark.parametrize("name", ["kimi-k2.5", "glm-5.3-flash"])
def test_the_first_rank_has_what_sees_where_pictures_are_not_served(name):
    model = plan_model(name, published()[name], [], item=2)
    seeing = model.by_role()["vision"]
    assert not model.media and seeing > 0
    plan = make_plan(model, ServingTarget(GPUS["h200"], 8, batch_tokens=1024), Split(8))
    assert plan.ranks[0].weights["vision"] == seeing and plan.unused_bytes == 7 * seeing
    first, second = make_plan(model, ServingTarget(GPUS["h200"], 16, batch_tokens=1024), Split(8, 2)).ranks
    assert first.weights["vision"] == seeing and "vision" not in second.weights


def test_longer_contexts_take_larger_pictures_and_longer_sounds(tmp_path):
    """Of families whose files have as many places as they need; a file never has more than the context."""
    folder = sight.write(tmp_path / "qwen3_vl", "qwen3_vl")
    config = config_of(folder)
    module, settings = without_weights(config, full_config(config)), read_settings(folder)
    small, large = (encodings(module, settings, places)["image"] for places in (16, 1024))
    assert small.places == 16 < large.places and small.features < large.features
    assert large.places <= settings["image"]["max_pixels"] // 64
