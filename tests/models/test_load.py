"""What the loader takes, what it makes of it, and how it says no."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from serve_app.engine.kv_cache import KVShape
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.optimise import ALLOWED
from tests import tiny


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints by family, written once."""
    written = {}

    def get(family: str, **overrides):
        name = family + "".join(f"-{k}" for k in overrides)
        if name not in written:
            written[name] = tiny.write_checkpoint(tmp_path_factory.mktemp("models") / name, family, **overrides)
        return written[name]

    return get


@pytest.fixture
def copy(checkpoints, tmp_path):
    """A llama checkpoint one may spoil: its folder and a function that changes its config.json."""
    source, target = checkpoints("llama"), tmp_path / "model"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())

    def change(**fields):
        config = json.loads((target / "config.json").read_text())
        config.update(fields)
        (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return target, change


def reason(path, **options) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        load_causal_lm(path, **options)
    return str(caught.value)


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    """Next-token logits after ``tokens``, through the paged cache."""
    seen = []

    def forward(batch):
        seen.append(model.forward(batch).float())
        return seen[-1]

    engine = tiny.make_engine(model)
    engine.runner.forward = forward
    engine.add(tiny.make_request("x", tokens, max_tokens=1))
    engine.step()
    return seen[0][0]


# --- saying no ------------------------------------------------------------------------------------


def test_no_config(tmp_path):
    assert "config.json" in reason(tmp_path) and "Hugging Face" in reason(tmp_path)
    assert "config.json" in reason(tmp_path / "nowhere")


def test_pickles_are_never_opened(copy):
    path, _ = copy
    (path / "model.safetensors").unlink()
    assert "save_file" in reason(path)
    # Would fail loudly if anything tried to read it.
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    text = reason(path)
    assert "pytorch_model.bin" in text and "never opened" in text and "save_file" in text


def test_an_unknown_architecture(copy):
    path, change = copy
    change(model_type="brandnew", architectures=["BrandNewForCausalLM"])
    text = reason(path)
    assert "BrandNewForCausalLM" in text and "installed transformers" in text


@pytest.mark.parametrize(
    "fields", [{"architectures": None}, {"architectures": []}, {"model_type": None}, {"model_type": "a.b"}]
)
def test_no_architecture(copy, fields):
    path, change = copy
    change(**fields)
    assert "architectures" in reason(path) and "model_type" in reason(path)


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_that_generates_no_text(copy, name):
    path, change = copy
    change(architectures=[name])
    assert name in reason(path) and "task" in reason(path)


def test_an_encoder(tmp_path):
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert "BertForMaskedLM" in reason(tmp_path) and "task" in reason(tmp_path)


def test_attention_that_bypasses_the_cache(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    text = reason(tmp_path)
    assert "BloomForCausalLM" in text and "takes no positions" in text


def test_a_model_without_a_cache(tmp_path):
    config = RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, head_dim=16,
        lru_width=32,
    )  # fmt: skip
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    text = reason(tmp_path)
    assert "RecurrentGemmaForCausalLM" in text and "neither keys and values nor a state" in text


def test_an_unknown_dtype(copy):
    text = reason(copy[0], dtype="float12")
    assert "float12" in text and "bfloat16" in text


# --- code in a model's folder ---------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({marker!r}).write_text("executed")
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = {model_type!r}
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.mark.parametrize(
    ("model_type", "name", "loads"),
    [("own", "OwnForCausalLM", False), ("llama", "OwnForCausalLM", None), ("llama", "LlamaForCausalLM", True)],
)
def test_code_in_the_folder_is_never_run(copy, tmp_path, model_type, name, loads):
    path, change = copy
    marker = tmp_path / "marker"
    (path / "modeling_own.py").write_text(CODE.format(marker=str(marker), model_type=model_type))
    change(model_type=model_type, architectures=[name], auto_map=AUTO_MAP, trust_remote_code=True)
    if loads is False:
        assert "never run" in reason(path)
    else:
        # transformers has this kind of model itself; its own class is what runs.
        model = load_causal_lm(path, optimise=False)
        assert type(model.module).__module__ == "transformers.models.llama.modeling_llama"
    assert not marker.exists()


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", (3, 2, 16)),
        ("qwen3", (3, 2, 32)),  # head_dim is not hidden_size / heads
        ("gemma2", (3, 2, 32)),
        ("phi3", (3, 2, 16)),
    ],
)
def test_the_shape_of_the_cache(checkpoints, family, shape):
    model = tiny.load(checkpoints(family))
    assert model.kv_shape == KVShape.uniform(*shape, torch.float32)
    assert (model.vocab_size, model.max_model_len, model.device.type) == (256, 1024, "cpu")
    assert not model.module.training and not any(p.requires_grad for p in model.module.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_optimising_keeps_the_logits(checkpoints, family):
    tokens = [7, 99, 3, 250, 12] * 9
    plain = logits_of(tiny.load(checkpoints(family)), tokens)
    model = load_causal_lm(checkpoints(family), optimise=True)
    improved = logits_of(model, tokens)
    torch.testing.assert_close(improved, plain, atol=float(plain.abs().max()) * 1e-4, rtol=1e-3)
    assert model.report["relative_error"] < 1e-4


def test_logits_are_those_of_transformers(checkpoints):
    tokens = [7, 99, 3, 250, 12] * 9
    wanted = tiny.load_reference(checkpoints("llama"))(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(logits_of(tiny.load(checkpoints("llama")), tokens), wanted, atol=1e-4, rtol=1e-3)


def test_tied_embeddings(checkpoints):
    path = checkpoints("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    tokens = [7, 99, 3, 250, 12]
    wanted = tiny.load_reference(path)(torch.tensor([tokens])).logits[0, -1]
    for optimise in (False, True):
        got = logits_of(load_causal_lm(path, optimise=optimise), tokens)
        torch.testing.assert_close(got, wanted, atol=float(wanted.detach().abs().max()) * 1e-4, rtol=1e-3)


def test_float16_is_read_as_bfloat16_on_cpu(copy):
    path, change = copy
    weights = load_file(path / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})
    change(dtype="float16")
    model = load_causal_lm(path)
    assert model.kv_shape.dtype == torch.bfloat16
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    exact = logits_of(load_causal_lm(path, dtype="float32"), [7, 99, 3])
    error = (logits_of(model, [7, 99, 3]) - exact).abs().max() / exact.abs().max()
    assert error < 0.05


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16)],
)
def test_auto_is_what_the_checkpoint_says(copy, fields, dtype):
    path, change = copy
    change(**fields)
    assert tiny.load(path).kv_shape.dtype == dtype
    assert tiny.load(path, dtype="float32").kv_shape.dtype == torch.float32


def test_the_context_can_only_be_cut(checkpoints):
    assert tiny.load(checkpoints("llama"), max_model_len=100).max_model_len == 100
    assert tiny.load(checkpoints("llama"), max_model_len=10**6).max_model_len == 1024


def test_progress_is_told(checkpoints):
    stages: list[str] = []
    model = load_causal_lm(checkpoints("llama"), optimise=False, progress=stages.append)
    assert stages == ["importing", "loading weights", "optimising"]
    assert {"import_s", "load_s", "ready_s"} <= model.report.keys()


def test_linears_stay_as_they_are_where_packed_ones_change_the_model(checkpoints, monkeypatch):
    path = checkpoints("gemma2")
    monkeypatch.setitem(ALLOWED, torch.float32, -1.0)  # nothing agrees so well
    model = load_causal_lm(path)
    assert model.report["linears"].startswith("left as they are: with packed linears and experts it differs by")
    prompt = [5, 9, 2, 77, 31]
    engine = tiny.make_engine(model)
    engine.add(tiny.make_request("x", prompt, max_tokens=6, ignore_eos=True))
    assert tiny.run_all(engine)["x"] == tiny.reference_tokens(tiny.load_reference(path), prompt, 6)
