"""Workers that draft for themselves: an EAGLE-3 head and a draft model in the worker's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors

from serve_app.engine.request import Request
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.kv.export import ExportBuffer
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.sampling_params import SamplingParams
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, digest_of
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.kv_publish import Publisher
from serve_app.worker.loading import load_engine
from serve_app.worker.spec import WorkerSpec
from tests import tiny
from tests.adapters import made
from tests.models.heads.written import write_head

PROMPT = [(5 * i + 2) % 256 for i in range(70)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("target"), "llama")


def load(target: Path, tmp_path: Path, *, method: str = "deployment", weights: Path | None = None, **options):
    spec = WorkerSpec(
        "@cf/me/mine", "decode", {"path": str(target)}, "record.yaml", str(tmp_path), cpu_threads=1, max_num_seqs=6,
        draft_method=method, draft_weights={"path": str(weights)} if weights is not None else None,
        speculate_tokens=options.get("draft_tokens", 0), **options,
    )  # fmt: skip
    publisher = Publisher(None, ExportBuffer(0), lambda: None)  # nothing is published without an event loop
    return load_engine(spec, lambda stage: None, publish=lambda *_: publisher, draft=DraftLink())


def answer(engine, **adapter: Any) -> list[int]:
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    root = adapter.get("adapter_digest", "").encode() or b"root"
    engine.add(Request("x", list(PROMPT), len(PROMPT), sampling, root, **adapter))
    return tiny.run_all(engine)["x"]


def tuned(target: Path, folder: Path, seed: int) -> Path:
    """An adapter of the model in ``target``, of whose answers it leaves little."""
    model = tiny.load_reference(target)
    linears = ("q_proj", "v_proj", "o_proj", "down_proj")
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if name.endswith(linears)}
    folder.mkdir()
    (folder / CONFIG).write_bytes(made.config(target_modules=list(linears)))
    tensors = {name: 3 * tensor for name, tensor in safetensors.load(made.weights(shapes, seed=seed)).items()}
    (folder / WEIGHTS).write_bytes(safetensors.save(tensors))
    return folder


@pytest.fixture(scope="module")
def plain(target, tmp_path_factory):
    return answer(load(target, tmp_path_factory.mktemp("plain")).engine)


def test_an_eagle_head_in_the_worker(target, plain, tmp_path):
    head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    loaded = load(target, tmp_path, method="eagle3", weights=head, draft_tokens=3, always_draft=True)
    model, engine = loaded.model, loaded.engine
    assert isinstance(engine.speculation.proposers[-1], EagleProposer)
    assert len(model.kv_shape.layers) == 4 == engine.runner.kv.planes[0].shape[0]
    assert answer(engine) == plain
    assert engine.speculation.stats()["proposed_tokens"] > 0
    # The whole context still fits beside the blocks that the chains use.
    assert engine.scheduler.max_model_len == 1024
    other = write_head(tmp_path / "other", seed=1, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    changed = load(target, tmp_path, method="eagle3", weights=other, draft_tokens=3)
    assert loaded.root_of(b"salt", "") != changed.root_of(b"salt", "")


def test_a_prefill_worker_fills_the_heads_layer(target, tmp_path):
    head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    loaded = load(target, tmp_path, method="eagle3", weights=head, publish=True)
    engine, root = loaded.engine, loaded.root_of
    assert engine.speculation is None
    request = Request("p", list(PROMPT), len(PROMPT), SamplingParams(), root(b"salt", ""), prefill_only=True)
    engine.add(request)
    blocks = None
    while engine.has_work:
        engine.step()
        blocks = blocks or engine.scheduler.blocks.match(request.keys)
    assert len(blocks) == 2
    assert engine.runner.kv.layer(3)[:, blocks].abs().sum((2, 4)).min() > 0
    assert engine.runner.observer._unread == {}


@pytest.mark.parametrize("same", [True, False], ids=["perfect-draft", "useless-draft"])
def test_a_draft_model_in_the_worker(same, target, plain, tmp_path):
    draft = target if same else tiny.write_checkpoint(tmp_path / "draft", "qwen3", seed=3)
    engine = load(target, tmp_path, method="colocated", weights=draft, draft_tokens=4, always_draft=True).engine
    assert answer(engine) == plain
    stats = engine.speculation.stats()
    assert stats["acceptance_rate"] > 0.99 if same else stats["acceptance_rate"] < 0.5


@pytest.mark.slow
def test_a_draft_model_has_adapters_of_its_own(target, tmp_path):
    """The draft is the model itself, so that what it drafts stands if it has the request's adapter, and seldom if
    not.
    """
    folders = [tuned(target, tmp_path / name, seed) for seed, name in enumerate(("mine", "other"))]
    digests = [digest_of((f / CONFIG).read_bytes(), (f / WEIGHTS).read_bytes()) for f in folders]
    options = {"draft_tokens": 4, "always_draft": True, "draft_lora": {str(folders[0]): str(folders[0])}}
    loaded = load(target, tmp_path, method="colocated", weights=target, adapters=2, **options)
    plain = load(target, tmp_path, adapters=2)
    for engine_of in (loaded, plain):
        bank = engine_of.model.adapters
        for place, folder in enumerate(folders, start=1):
            bank.put(place, bank.read((folder / CONFIG).read_bytes(), folder / WEIGHTS))
    drafted = {}
    for place, digest in enumerate(["", *digests]):
        before = loaded.engine.speculation.stats()
        adapter = {"adapter": place, "adapter_digest": digest}
        assert answer(loaded.engine, **adapter) == answer(plain.engine, **adapter)
        after = loaded.engine.speculation.stats()
        tokens = [after[name] - before[name] for name in ("accepted_tokens", "proposed_tokens")]
        drafted[place] = tokens[0] / tokens[1]
    assert drafted[0] > 0.99 and drafted[1] > 0.99 and drafted[2] < 0.6


def test_an_adapter_that_a_draft_cannot_have_is_left_out(target, plain, tmp_path, caplog):
    mine = tuned(target, tmp_path / "mine", 1)
    (tmp_path / "bad").mkdir()
    for path in ("bad", "gone"):
        pairs = {str(mine): str(tmp_path / path)}
        options = {"draft_tokens": 4, "always_draft": True, "draft_lora": pairs}
        assert answer(load(target, tmp_path, method="colocated", weights=target, **options).engine) == plain
        assert "drafted for without one" in caplog.text
        caplog.clear()


def test_a_head_of_another_model_is_refused_when_the_worker_starts(target, tmp_path):
    head = write_head(tmp_path / "head", hidden_size=32, intermediate_size=64)
    with pytest.raises(UnsupportedModel, match="give the head of this model"):
        load(target, tmp_path, method="eagle3", weights=head, draft_tokens=3)
