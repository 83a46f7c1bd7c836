"""EAGLE-3 heads as they are published: loaded, compared with a plain reading of the paper, or refused with a remedy."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from serve_app.engine.speculation.eagle import EagleProposer, HeadRows
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.engine.step import Capture, Scheduled, build_batch
from serve_app.models.heads.eagle import attach_head
from serve_app.models.loading.folder import UnsupportedModel
from tests import tiny
from tests.models.heads.written import CONFIG, plain_head, write_head
from tests.variants import some

TOKENS = [(13 * i + 5) % 256 for i in range(45)]
LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
SHAPES = {
    "eagle": ("eagle", LAYERS),
    "sglang-layer-ids": ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}),
    "speculators": ("speculators", {**LAYERS, "norm_before_residual": True}),
    "norm-before-fc": ("speculators", {**LAYERS, "norm_before_residual": False, "norm_before_fc": True}),
    "fc-norm": ("speculators", {**LAYERS, "norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "more-kv-heads": ("eagle", {**LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
    "fewer-kv-heads": ("eagle", {**LAYERS, "num_key_value_heads": 1}),
    "narrow": ("eagle", {**LAYERS, "hidden_size": 32, "target_hidden_size": 64, "head_dim": 8}),
}  # fmt: skip


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.mark.parametrize("tied", [False, True])
def test_without_an_output_layer_the_targets_serves(tied, tmp_path):
    """Of it, the rows that can be drafted."""
    target = tiny.write_checkpoint(tmp_path / "target", "llama", tie_word_embeddings=tied)
    fused, plain = tiny.load(target, optimise=True), tiny.load(target)
    path = write_head(tmp_path / "head", edit=drop("lm_head.weight"), **LAYERS)
    head = attach_head(fused, path)
    output = plain.module.get_output_embeddings().weight
    assert torch.equal(head._output_weight({}, fused), output[head._ids])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("optimise", some([False, True], True), ids=["transformers", "fused"])
def test_a_published_head_drafts_as_the_paper_says(name, optimise, target, tmp_path):
    compare(target, name, optimise, tmp_path)


def test_beside_latents_the_head_has_keys_and_values_of_its_own(tmp_path):
    """As many heads as it likes, of any width: the target's cache has one vector a token."""
    target = tiny.write_checkpoint(tmp_path / "target", "deepseek_v3")
    compare(target, "more-kv-heads", False, tmp_path / "head", layers=1)
    model = tiny.load(target)
    attach_head(model, tmp_path / "head")
    assert [layer.shared for layer in model.kv_shape.layers] == [True, True, True, False]
    assert (model.kv_shape.layers[-1].kv_heads, model.kv_shape.layers[-1].head_dim) == (4, 16)


def compare(target, name, optimise, tmp_path, layers=None):
    """``layers`` of the cache that the head takes."""
    layout, config = SHAPES[name]
    path = write_head(tmp_path, layout=layout, **config)
    model = tiny.load(target, optimise=optimise)
    head = attach_head(model, path)
    assert head.layers == (0, 1, 2)
    assert len(model.kv_shape.layers) == 3 + (layers or (2 if name == "more-kv-heads" else 1))
    kv = model.kv_shape.allocate(6, "cpu")
    request = tiny.make_request("x", TOKENS)
    request.blocks = [3, 1]
    with torch.inference_mode():
        batch = build_batch([Scheduled(request, 0, len(TOKENS) - 1, 0)], kv)
        batch.capture = Capture(head.layers)
        model.forward(batch)
        states = batch.capture.states
        first, second = (
            HeadRows(request, start, count, count, TOKENS[start + 1 :][:count], request.blocks)
            for start, count in ((0, 20), (20, 24))
        )
        got = [head(build_batch([rows], kv), head.fuse(states[rows.start :][: rows.count])) for rows in (first, second)]
        chain = [HeadRows(request, 44, 1, 1, got[1][0][-1:].tolist(), request.blocks)]
        ids, hidden = head(build_batch(chain, kv), got[1][1][-1:])
    tensors, told = load_file(path / "model.safetensors"), {**CONFIG, **config}
    embedding = tiny.load_reference(target).get_input_embeddings().weight.detach()
    following = torch.tensor(TOKENS[1:])
    want, feedback = plain_head(tensors, told, embedding, states, following)
    assert torch.equal(torch.cat([g[0] for g in got]), want)
    torch.testing.assert_close(torch.cat([g[1] for g in got]), feedback, rtol=1e-3, atol=1e-3)
    more = torch.cat([following, want[-1:]])
    want, feedback = plain_head(tensors, told, embedding, states, more, feedback[-1:])
    assert ids.item() == want[-1]
    torch.testing.assert_close(hidden[0], feedback[-1], rtol=1e-3, atol=1e-3)


def test_a_cache_of_another_dtype(target, tmp_path):
    model = tiny.load(target, kv_cache_dtype="fp8")

    def answer(speculating):
        engine = tiny.make_engine(model)
        if speculating:
            proposer = EagleProposer(head, engine.runner.kv, engine.scheduler.blocks, 1)
            engine.runner.observer = proposer
            engine.speculation = Speculation(proposer, VerifyEverything(3))
        engine.add(tiny.make_request("x", [5, 9, 70, 12] * 20, max_tokens=24))
        return tiny.run_all(engine)["x"], engine

    plain, _ = answer(False)
    head = attach_head(model, write_head(tmp_path, **LAYERS))
    tokens, engine = answer(True)
    assert tokens == plain
    assert engine.speculation.stats()["proposed_tokens"] > 0


def test_without_layer_ids_the_papers_are_taken(tmp_path):
    deep = tiny.write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=10)
    assert attach_head(tiny.load(deep), write_head(tmp_path / "head")).layers == (2, 5, 7)


def add(name):
    return lambda tensors: tensors.update({name: torch.zeros(2)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_size": 32, "intermediate_size": 64}, "width 32, not 64"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "target has 3"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"head_dim": 32}, "room for 16"),
        ({"edit": drop("midlayer.self_attn.q_proj.weight")}, "q_proj.weight is missing"),
        ({"edit": drop("d2t")}, "no d2t"),
        ({"edit": add("midlayer.self_attn.q_norm.weight")}, "q_norm.weight"),
        ({"edit": lambda t: t["d2t"].add_(200)}, "drafts tokens"),
        ({"edit": lambda t: t.update({"fc.weight": torch.zeros(64, 128)})}, r"fc.weight is \[64, 128\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "no EAGLE-3"),
    ],
)
def test_what_is_not_this_models_head_is_refused(options, reason, target, tmp_path):
    model = tiny.load(target)
    before = model.kv_shape
    with pytest.raises(UnsupportedModel, match=reason):
        attach_head(model, write_head(tmp_path, **{**LAYERS, **options}))
    assert model.kv_shape == before


def test_a_pickle_is_never_opened(target, tmp_path):
    path = write_head(tmp_path, **LAYERS)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pytorch_model.bin.*never opened.*safetensors.torch.save_file"):
        attach_head(tiny.load(target), path)


def test_other_speculators_are_refused(target, tmp_path):
    path = write_head(tmp_path, layout="speculators", **LAYERS)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "speculators_model_type": "mlp"}))
    with pytest.raises(UnsupportedModel, match="type mlp"):
        attach_head(tiny.load(target), path)
