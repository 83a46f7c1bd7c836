"""Our own reader of safetensors gives the model that transformers gives, or says why it can't."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.models import attention
from serve_app.models.loading import weights
from tests import tiny


def read(path, model_class, dtype=torch.float32, **options):
    attention.register()
    return weights.load_module(
        model_class, path, attn_implementation=attention.NAME, dtype=dtype, device=torch.device("cpu"), **options
    )


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_from_pretrained(family, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SLICE", 1000)  # tensors are cut
    path = tiny.write_checkpoint(tmp_path, family, tie_word_embeddings=family in ("qwen3", "gemma2"))
    model_class = tiny.FAMILIES[family][1]
    module, report = read(path, model_class, dtype)
    want = model_class.from_pretrained(path, dtype=dtype)
    assert report["weight_bytes"] == sum(f.stat().st_size for f in path.glob("*.safetensors")) - header_bytes(path)
    got_state, want_state = module.state_dict(), want.state_dict()
    assert list(got_state) == list(want_state)
    for name, tensor in want_state.items():
        assert torch.equal(got_state[name], tensor) and got_state[name].dtype == tensor.dtype, name
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    assert tied == (family in ("qwen3", "gemma2"))
    for (name, buffer), (_, wanted) in zip(module.named_buffers(), want.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, msg=name)
    assert module.generation_config.eos_token_id == want.generation_config.eos_token_id


def header_bytes(path) -> int:
    total = 0
    for file in path.glob("*.safetensors"):
        total += 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return total


def test_several_files_and_progress(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama")
    whole = load_file(path / "model.safetensors")
    names = sorted(whole)
    (path / "model.safetensors").unlink()
    save_file({n: whole[n] for n in names[::2]}, path / "model-00001-of-00002.safetensors")
    save_file({n: whole[n] for n in names[1::2]}, path / "model-00002-of-00002.safetensors")
    module, _ = read(path, tiny.FAMILIES["llama"][1])
    assert all(torch.equal(module.state_dict()[n], whole[n]) for n in names)


@pytest.mark.parametrize("change", ["extra", "missing", "shape", "dtype"])
def test_what_is_not_plain_is_left_to_transformers(change, tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "extra":
        tensors["model.layers.0.mlp.experts"] = torch.zeros(2)
    elif change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:1].clone()
    else:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(weights.NotPlain, match="up_proj|experts"):
        read(path, tiny.FAMILIES["llama"][1])


def test_a_cut_file_is_an_error(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="ends before"):
        read(path, tiny.FAMILIES["llama"][1])
