"""Linears that are plugged in: a delta per request gives what a model with that delta merged into its weights gives."""

from __future__ import annotations

import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.engine.step import Capture
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.reference.operators import TORCH
from serve_app.models.decoders import decoder_parts
from serve_app.models.decoders.device import DeviceForward
from serve_app.models.linears import Place
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.variants import some

NEW_TOKENS = 6
ADAPTERS = (1, 2)


def delta(adapter: int, name: str, rows: int, columns: int) -> torch.Tensor:
    """What an adapter adds to a weight: of rank 2, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * adapter + zlib.crc32(name.encode()) % 1000)
    down, up = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
    return up @ down * 0.02


class AdapterLinear(Linear):
    """The linear of a base model plus, for each row, its own request's delta."""

    def __init__(self, place: Place, inner: Linear, touched: set[str]) -> None:
        self.place, self.inner, self.touched = place, inner, touched

    def __call__(self, x, batch, rows=None):
        out = self.inner(x, batch, rows)
        if batch.adapters is None:
            return out
        which = batch.adapters if rows is None else batch.adapters[rows]
        for adapter in ADAPTERS:
            own = (which == adapter).nonzero().squeeze(1)
            at = 0
            for name, width in zip(self.place.names, self.place.widths, strict=True):
                if name in self.touched:
                    part = delta(adapter, name, width, x.shape[-1])
                    out[own, at : at + width] += x[own] @ part.T
                at += width
        return out


def adapted(touched: set[str]):
    def plug(place: Place, linear: Linear) -> Linear:
        return AdapterLinear(place, linear, touched) if touched & set(place.names) else linear

    return plug


def merged(path, target, adapter: int):
    """A copy of the checkpoint with the adapter's deltas in its linears; returns the names of those."""
    tensors, touched = load_file(path / "model.safetensors"), set()
    for name, weight in tensors.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            touched.add(name.removesuffix(".weight"))
            tensors[name] = weight + delta(adapter, name.removesuffix(".weight"), *weight.shape)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    for file in path.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return touched


@pytest.fixture(scope="module", params=some(["llama", "gemma2", "phi3"], "gemma2", "phi3"))
def checkpoints(request, tmp_path_factory):
    """The base model's folder, those of the merged ones, and the linears that the adapters touch."""
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny.write_checkpoint(folder / "base", request.param)
    touched = [merged(path, folder / str(adapter), adapter) for adapter in ADAPTERS][0]
    return path, {0: path} | {adapter: folder / str(adapter) for adapter in ADAPTERS}, touched


def with_adapter(forward, adapter: int):
    """The forward pass of batches in which every row has the adapter."""

    def called(batch):
        batch.adapters = torch.full((len(batch.input_ids),), adapter)
        return forward(batch)

    return called


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * r) % 250 + 3 for i in range(10 + 27 * r)] for r in range(4)]


@pytest.mark.parametrize("optimise", [False, True], ids=["transformers", "optimised"])
def test_a_delta_per_request_is_what_merged_weights_are(checkpoints, optimise):
    path, folders, touched = checkpoints
    model = tiny.load(path, optimise=optimise, plug=adapted(touched))
    fused = path.parent.name.startswith(("llama", "phi3"))
    assert ("fused_decoder" in model.report) == (optimise and fused)
    # Chunks of prompts with different adapters share each batch.
    engine = tiny.make_engine(model, num_blocks=100, max_batch_tokens=50)
    wanted = {}
    references = {adapter: tiny.load_reference(folder) for adapter, folder in folders.items()}
    for index, prompt in enumerate(prompts()):
        # What an adapter computes has cache keys of its own.
        request = tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS, root=tiny.ROOT + bytes([index % 3]))
        request.adapter = index % 3
        engine.add(request)
        wanted[str(index)] = tiny.reference_tokens(references[request.adapter], prompt, NEW_TOKENS)
    assert tiny.run_all(engine) == wanted
    logits = probe(model, with_adapter(model.forward, 2))
    whole, base = tiny.load(folders[2]), tiny.load(path)
    torch.testing.assert_close(logits, probe(whole, whole.forward), atol=2e-3, rtol=2e-3)
    assert difference(logits, probe(base, base.forward)) > 0.05


def test_the_layers_for_gpus_ask_for_linears_too(checkpoints):
    path, folders, touched = checkpoints
    if "gemma2" in path.parent.name:
        pytest.skip("not a standard decoder")
    model = tiny.load(path)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    forward = DeviceForward(parts, TORCH, 256, plug=adapted(touched))
    whole = tiny.load(folders[2])

    all_with_two = with_adapter(forward, 2)
    torch.testing.assert_close(probe(model, all_with_two), probe(whole, whole.forward), atol=2e-3, rtol=2e-3)

    # Behind the last attention only sampled rows go on.
    def last_row_only(run):
        def called(batch):
            batch.sample_rows = batch.sample_rows[-1:]
            return run(batch)

        return called

    torch.testing.assert_close(
        probe(model, last_row_only(all_with_two)), probe(whole, last_row_only(whole.forward)), atol=2e-3, rtol=2e-3
    )


def test_a_step_that_samples_nothing(tmp_path):
    """A piece of a prompt: a head that is plugged gets no rows."""
    path = tiny.write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    prompt, found = [(7 * i * i + 5) % 250 for i in range(30)], []
    for options in ({}, {"plug": adapted({"lm_head"})}):
        engine = tiny.make_engine(tiny.load(path, **options), max_batch_tokens=8)
        engine.add(tiny.make_request("x", prompt, max_tokens=NEW_TOKENS, ignore_eos=True))
        found.append(tiny.run_all(engine)["x"])
    assert found[0] == found[1]


def test_every_linear_is_asked_for_once_by_name(tmp_path):
    asked: list[str] = []

    def plug(place: Place, linear: Linear) -> Linear:
        asked.extend(place.names)
        return linear

    path = tiny.write_checkpoint(tmp_path, "qwen2")
    wanted = {n for n, m in tiny.load(path).module.named_modules() if type(m) is torch.nn.Linear}
    for optimise in (False, True):
        asked.clear()
        model = tiny.load(path, optimise=optimise, plug=plug)
        assert sorted(asked) == sorted(wanted)
    assert "plugged" not in model.report


def test_a_plugged_module_runs_in_the_models_forward_only(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama")
    model = tiny.load(path, plug=adapted({"model.layers.0.self_attn.q_proj"}))
    assert model.report["plugged"] == 1
    logits = probe(model, model.forward)
    assert torch.equal(logits, probe(tiny.load(path), tiny.load(path).forward))
    with pytest.raises(RuntimeError, match="forward function only"):
        model.module(input_ids=torch.tensor([[1, 2]]))


def test_hidden_states_are_captured_beside_plugged_linears(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"), optimise=True, plug=lambda place, linear: linear)
    plain = tiny.load(tmp_path)
    states = []
    for one in (model, plain):

        def capturing(batch, run=one.forward):
            batch.capture = Capture((1, 2))
            logits = run(batch)
            states.append(batch.capture.states)
            return logits

        probe(one, capturing)
    torch.testing.assert_close(states[0], states[2], atol=1e-4, rtol=1e-4)
