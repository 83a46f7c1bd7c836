"""Adapters and roundings decide what workers keep, and plans say the same."""

import json

import pytest
from transformers import GlmMoeDsaForCausalLM

from serve_app.catalog.load import load_catalog
from serve_app.cli.program import main
from serve_app.kernels.linear.fp8 import Fp8Linear
from serve_app.models.load import load_causal_lm
from serve_app.planning.devices import GPUS
from serve_app.planning.held import Held
from serve_app.planning.plan import DoesNotFit, ServingTarget, make_plan, to_json
from serve_app.planning.ranks import DoesNotDivide, Split, divide
from serve_app.planning.rounded import NotRounded
from serve_app.planning.say import said
from serve_app.planning.source import plan_model, published
from serve_app.planning.tensors import read_headers
from serve_app.planning.wanted import Wanted
from tests import tiny

WAYS = {"plain": Wanted(), "adapters": Wanted(adapters=True), "int8": Wanted(quantization="int8")}


def model_of(name, wanted):
    return plan_model(name, published()[name], [], item=2, wanted=wanted)


def rank_of(model, split):
    return divide(model, split, batch_tokens=2048, sampled=64)[0]


def planned(folder, wanted):
    return plan_model(
        "x", json.loads((folder / "config.json").read_text()), read_headers(folder), item=2, wanted=wanted
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_keeps_latents_where_a_worker_does(one_thread, tmp_path, way):
    wanted = WAYS[way]
    folder = tiny.write_checkpoint(tmp_path, "deepseek_v3")
    adapters = 2 if wanted.adapters else 0
    loaded = load_causal_lm(folder, dtype="bfloat16", quantization=wanted.quantization, adapters=adapters)
    caches = planned(folder, wanted).caches
    assert sum(cache.token_bytes for cache in caches) == loaded.kv_shape.block_bytes // 32
    assert {cache.kind == "latent" for cache in caches} == {way == "plain"}


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_keeps_what_indexers_choose_by(one_thread, tmp_path, way):
    """Beside latents, or beside every head's keys and values."""
    wanted = WAYS[way]
    folder = tiny.write_small(tmp_path, GlmMoeDsaForCausalLM, indexer_types=["full", "shared", "full", "shared"])
    adapters = 2 if wanted.adapters else 0
    loaded = load_causal_lm(folder, dtype="bfloat16", quantization=wanted.quantization, adapters=adapters)
    caches = planned(folder, wanted).caches
    assert sum(cache.token_bytes for cache in caches) == loaded.kv_shape.block_bytes // 32
    assert [cache.indexed > 0 for cache in caches] == [True, False, True, False]


def test_heads_take_much_more_than_latents():
    latent, heads = (model_of("glm-4.7-flash", WAYS[way]).caches[0].token_bytes for way in ("plain", "adapters"))
    assert heads / latent == pytest.approx(17.8, abs=0.1)


def test_a_plan_counts_what_a_worker_holds_in_float8(one_thread, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    folder = tiny.write_checkpoint(tmp_path, "llama", **sizes)
    forward = load_causal_lm(folder, dtype="bfloat16", quantization="fp8").forward
    linears = [linear for each in forward.layers for linear in (each.qkv, each.o, each.gate_up, each.down)]
    assert all(type(linear) is Fp8Linear for linear in linears)
    held = planned(folder, Wanted(quantization="fp8")).by_role()
    assert sum(each.codes.nbytes + each.scale.nbytes for each in linears) == held["attention"] + held["mlp"]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_float8_is_counted_on_ranks_that_divide_layers(ranks):
    names = ("none", "fp8")
    plain, rounded = (rank_of(model_of("llama-3.3-70b-instruct", Wanted(quantization=n)), Split(ranks)) for n in names)
    for role in ("attention", "mlp"):
        assert rounded.weights[role] == pytest.approx(plain.weights[role] / 2, rel=0.001)
    for role in ("head", "embedding", "norms"):
        assert rounded.weights[role] == plain.weights[role]
    # What is rounded lies there as a whole until the last layer is.
    assert rounded.passing == pytest.approx(plain.weights["attention"] + plain.weights["mlp"], rel=0.001)


def test_what_fits_once_it_is_rounded_may_not_fit_while_it_loads():
    model = model_of("llama-3.3-70b-instruct", Wanted(quantization="fp8"))
    asked = ServingTarget(GPUS["h100"], 4)
    with pytest.raises(DoesNotFit, match="while it loads, until its weights are rounded"):
        make_plan(model, ServingTarget(GPUS["h200"]), Split())
    plan = make_plan(model, asked, Split(4))
    assert to_json(plan)["wanted"] == {"adapters": False, "quantization": "fp8", "kv_cache_dtype": "auto"}
    assert "asked for: quantization fp8" in said(plan) and "until it is loaded" in said(plan)
    with pytest.raises(DoesNotDivide, match="stages run on transformers' forward"):
        make_plan(model, asked, Split(2, 2))


def test_codes_of_whole_numbers_lie_beside_numbers_on_gpus():
    dense = {name: rank_of(model_of("llama-3.3-70b-instruct", Wanted(quantization=name)), Split(4)) for name in (
        "none", "int8")}  # fmt: skip
    assert dense["int8"].weights == dense["none"].weights and dense["int8"].passing > 0
    mixture = {name: model_of("glm-4.7-flash", Wanted(quantization=name)).by_role() for name in ("none", "int8")}
    assert mixture["int8"]["experts"] == pytest.approx(mixture["none"]["experts"] * (1 + 33 / 64), rel=0.001)


@pytest.mark.parametrize(
    ("name", "quantization", "reason"),
    [
        ("gpt-oss-20b", "fp8", "the experts do not compute in float8"),
        ("llama-3.3-70b-instruct-fp8", "int8", "the weights are in fp8 already"),
    ],
)
def test_what_workers_do_not_round_is_not_planned(name, quantization, reason):
    with pytest.raises(NotRounded, match=reason):
        model_of(name, Wanted(quantization=quantization))
    with pytest.raises(NotRounded, match="is for GPUs"):
        plan_model(name, published()[name], [], item=2, held=Held(), wanted=Wanted(quantization="fp8"))


def test_packed_experts_are_unpacked_for_adapters():
    packed, unpacked = (rank_of(model_of("gpt-oss-20b", WAYS[way]), Split()) for way in ("plain", "adapters"))
    assert unpacked.weights["experts"] == pytest.approx(packed.weights["experts"] * 16 / 4.25, rel=0.02)


def test_the_command_asks_the_record_and_writes_what_it_has_planned(tmp_path, monkeypatch, capsys):
    """Options come before the record."""
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    monkeypatch.setenv("SERVE_APP_HOME", str(home))
    folder = tiny.write_checkpoint(tmp_path / "Tiny", "deepseek_v3")

    def bytes_per_token(*arguments):
        assert main(["plan", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["kv_cache"]["bytes_per_token"]

    file, other = home / "models" / "tiny.yaml", tmp_path / "other.yaml"
    heads, latents = bytes_per_token(folder, "--adapters", "--write", file), bytes_per_token(folder)
    assert heads > latents == 2 * bytes_per_token(folder, "--kv-dtype", "fp8")
    record = load_catalog(home)["@cf/local/tiny"]
    assert record.adapters is not None
    assert bytes_per_token(record.id) == heads and bytes_per_token(record.id, "--no-adapters") == latents
    assert bytes_per_token(record.id, "--kv-dtype", "fp8", "--write", other) == heads // 2
    assert "kv_cache_dtype: fp8" in other.read_text() and "lora: true" in other.read_text()
    assert main(["plan", str(folder), "--quantization", "fp8"]) == 1
    assert "do not compute in float8" in capsys.readouterr().err
