"""The part of a model that looks: transformers' own features, for one picture and for several at once."""

from __future__ import annotations

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from serve_app.models.loading.miniature import randomise
from serve_app.predict.pictures import Pictures
from serve_app.predict.predictor import Place
from tests import sight, tiny
from tests.variants import some


@pytest.fixture(scope="module", params=some([f for f in sight.FAMILIES if f != "mllama"], "gemma3", "qwen2_5_vl"))
def path(request, tmp_path_factory):
    return sight.write(tmp_path_factory.mktemp("model") / request.param, request.param)


def test_features_are_transformers_own(path):
    model, truth = tiny.load(path, optimise=True), sight.Truth(path)
    # The decoder is the fused one where text alone would have it: what looks stands beside it.
    assert ("fused_decoder" in model.report) == (path.name not in ("gemma3", "llama4", "qwen3_5"))
    encoder = model.encoders["image"]
    files = [sight.picture(40, 30, seed) for seed in range(3)]
    prepared = Pictures(Place(path), **encoder.options)
    try:
        given = [prepared.item(file).value for file in files]
    finally:
        prepared.close()
    together = encoder(given)
    for file, one, found in zip(files, given, together, strict=True):
        with torch.inference_mode():
            if path.name == "llama4":
                their = truth.model.get_image_features(**truth.seen([file]), return_dict=True).last_hidden_state
                parts = [[truth.model.multi_modal_projector(their).flatten(0, 1)]]
            else:
                their = truth.model.model.get_image_features(**truth.seen([file]), return_dict=True)
                parts = [their.pooler_output, *getattr(their, "deepstack_features", ())]
        wanted = torch.cat([part for [part] in parts], 1)
        assert len(parts) == (3 if path.name.startswith("qwen3") else 1)
        torch.testing.assert_close(found.features, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encoder([one])[0].features, found.features, atol=1e-5, rtol=1e-4)
        assert found.grid == encoder([one])[0].grid == ((4, 5) if path.name in sight.TURNING else None)


def test_models_without_eyes_have_no_encoder(tmp_path):
    assert tiny.load(tiny.write_checkpoint(tmp_path, "llama")).encoders == {}


def test_layers_that_attend_to_pictures_are_left_out_of_text(tmp_path):
    """Llama 3.2 Vision reads text without them, in transformers as here."""
    text = {**sight.TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "hidden_act": "silu"}
    seen = {"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4,
            "intermediate_size": 64, "vision_output_dim": 64, "image_size": 16, "patch_size": 8, "max_num_tiles": 2,
            "intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}  # fmt: skip
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=seen, text_config=text))
    randomise(model)
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i * i + n) % 5000 + 3 for i in range(n)] for n in (5, 70, 71)]
    wanted = {str(i): tiny.reference_tokens(model.eval(), p, 8, eos_token_id=None) for i, p in enumerate(prompts)}
    loaded = tiny.load(tmp_path, optimise=True)
    assert list(loaded.encoders) == ["image"] and len(loaded.kv_shape.layers) == 3
    engine = tiny.make_engine(loaded, num_blocks=40, max_batch_tokens=24)
    for i, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(i), prompt, max_tokens=8, ignore_eos=True))
    assert tiny.run_all(engine) == wanted


def test_keys_and_values_of_a_picture_are_transformers_own(tmp_path):
    """What layers of Llama 3.2 Vision keep of pictures in their caches, for one picture and for several at once."""
    path = sight.write(tmp_path / "mllama", "mllama")
    encoder, truth = tiny.load(path).encoders["image"], sight.Truth(path)
    files = [sight.picture(*size, seed) for seed, size in enumerate([(40, 30), (9, 9), (90, 33)])]
    prepared = Pictures(Place(path), **encoder.options)
    try:
        given = [prepared.item(file).value for file in files]
    finally:
        prepared.close()
    for file, one, found in zip(files, given, encoder(given), strict=True):
        seen = truth.seen([file])
        [[tiles]] = seen.pop("num_tiles")
        with torch.inference_mode():
            kept = truth.model(input_ids=torch.tensor([[1, sight.OWN + 10]]), **seen, use_cache=True).past_key_values
        wanted = torch.stack([torch.cat([kept.layers[i].keys, kept.layers[i].values]) for i in (1, 3)])
        torch.testing.assert_close(found.features[0], wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encoder([one])[0].features, found.features, atol=1e-5, rtol=1e-4)
        assert found.used == tiles * 17 and found.features.shape[-2] == 4 * 17
