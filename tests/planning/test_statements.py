"""What Cloudflare states of its own engine (blog, 2026-04-16), and sizes that models' authors publish."""

import pytest

from serve_app.catalog.load import load_catalog
from serve_app.planning.devices import GPUS
from serve_app.planning.plan import DoesNotFit, ServingTarget, best_plan, make_plan, to_json
from serve_app.planning.ranks import DoesNotDivide, Split
from serve_app.planning.rates import rates
from serve_app.planning.say import said
from serve_app.planning.source import plan_model, published
from tests.planning.large import LARGE

GiB = 1 << 30
# The share of a GPU and the rows of a step that both statements come out with; the rest of a GPU is for contexts,
# graphs and collectives.
SHARE, ROWS = 0.9365, 1024


def model_of(name, *, item=2):
    return plan_model(name, published()[name], [], item=item)


def test_llama_4_scout_fits_two_h200_with_56_gib_left_for_1_2_million_tokens():
    """Weights in bfloat16 (202 GiB with the vision tower), keys and values too; three of four layers attend to chunks
    of 8,192 tokens and keep no more.
    """
    model = model_of("llama-4-scout")
    assert model.values / 1e9 == pytest.approx(108.6, rel=0.005)
    plan = make_plan(model, ServingTarget(GPUS["h200"], 2, SHARE, ROWS), Split(2))
    assert plan.left_bytes / GiB == pytest.approx(56, abs=2)
    assert plan.token_bytes == 48 * 2 * 8 * 128 * 2 and plan.far_token_bytes == plan.token_bytes // 4
    assert plan.tokens_of_one_text == pytest.approx(1.2e6, rel=0.04)


def test_kimi_k2_5_fits_eight_h100_with_30_gib_left():
    """Routed experts in 4 bits with a scale for each 32, the rest in bfloat16; projections into the latent are divided
    among the ranks as everything else is. What sees lies on the first rank alone, and the others leave that unused.
    """
    model = model_of("kimi-k2.5")
    assert model.weight_bytes / 1e9 == pytest.approx(594, rel=0.01)
    assert model.active_values / 1e9 == pytest.approx(32, rel=0.05)
    plan = make_plan(model, ServingTarget(GPUS["h100"], 8, SHARE, ROWS), Split(8))
    assert (plan.left_bytes + plan.unused_bytes) / GiB == pytest.approx(30, abs=2)
    assert plan.unused_bytes == 7 * model.by_role()["vision"]
    # DeepSeek-V2's formula: the latent and the rotated key, once for all heads, of every layer.
    assert plan.token_bytes == 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("name", "gigabytes", "billions", "active"),
    [
        ("llama-3.3-70b-instruct", 141.1, 70.55, 69.5),
        ("llama-3.3-70b-instruct-fp8", 72.7, 70.55, 69.5),
        ("gpt-oss-120b", 65.2, 116.8, 5.13),
        ("gpt-oss-20b", 13.8, 20.9, 3.61),
        ("qwen3-30b-a3b-fp8", 31.2, 30.5, 3.04),
        ("deepseek-v3", 672.5, 671, 37),
        ("glm-4.7-flash", 59.9, 29.9, 3.7),
        ("mistral-small-3.1-24b-instruct", 48.0, 24.0, 22.9),
        ("gemma-3-12b-it", 24.4, 12.2, 11.8),
        ("gemma-3-27b-it", 54.9, 27.4, 27.0),
        ("gemma-4-26b-a4b-it", 51.6, 25.8, 3.8),
        ("deepseek-r1-distill-qwen-32b", 65.5, 32.8, 32.0),
        ("granite-4.0-h-micro", 6.4, 3.19, 3.19),
        ("nemotron-3-120b-a12b", 241.3, 120.6, 12.0),
        ("deepseek-v3.2", 674.0, 671.9, 37),
        # Without what drafts, as all that are published with such a layer; see below.
        ("glm-5.2", 1486.8, 743.4, 40),
        ("glm-5.3", 745.6, 743.4, 40),
        ("glm-5.3-flash", 320.8, 313.9, 17),
        ("qwen3.8-27b", 54.7, 27.36, 26),
    ],
)
def test_sizes_that_authors_publish(name, gigabytes, billions, active):
    model = model_of(name)
    assert model.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert model.values / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active_values / 1e9 == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("glm-5.2", 1507), ("glm-5.3", 755.6), ("glm-5.3-flash", 328.3), ("qwen3.8-27b", 55.563)]
)
def test_files_have_a_layer_that_drafts_beside_what_is_served(name, gigabytes):
    """As many bytes as repositories have are those of the model and of one layer more, with a product that makes one
    row of two (DeepSeek-V3, arXiv 2412.19437, section 2.2): headers beside them are less than a thousandth.
    """
    config = published()[name]
    model = plan_model(name, config, [], item=2)
    # What attends, with its indexer, and what has experts.
    last = max(i for i, layer in enumerate(model.layers) if "latent projections" in layer or not model.experts)
    drafts = sum(part.bytes for part in model.layers[last].values()) + 2 * 2 * model.hidden**2
    assert (model.weight_bytes + drafts) / 1e9 == pytest.approx(gigabytes, rel=0.001)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # Latent and rotated key of each layer, and an indexer's key of each layer that has one.
        ("deepseek-v3.2", 61 * (512 + 64 + 128)),
        ("glm-5.3", 78 * (512 + 64) + 21 * 128),
        # Of eleven layers that attend; keys, what weighs them in their pools, and whether there is one.
        ("glm-5.3-flash", 11 * (512 + 2 * 128 + 1)),
    ],
)
def test_what_a_token_takes_where_indexers_choose_keys(name, numbers):
    model = model_of(name)
    plan = make_plan(model, ServingTarget(GPUS["h200"], 8, batch_tokens=1024), Split(8))
    # Every rank has all of it.
    assert plan.token_bytes == 2 * numbers == sum(cache.rank_bytes(8) for cache in model.caches)
    assert make_plan(model_of(name, item=1), plan.asked, Split(8)).token_bytes == numbers


def test_a_query_reads_the_keys_that_are_chosen_for_it_and_those_by_which_they_are():
    full, shared = (model_of("glm-5.3").caches[layer] for layer in (2, 3))
    assert (full.indexed, shared.indexed) == (256, 0)
    for tokens in (100, 2048):
        assert full.read_bytes(tokens) == full.text_bytes(tokens) == tokens * 2 * (512 + 64 + 128)
    assert full.read_bytes(100_000) - shared.read_bytes(100_000) == 100_000 * 256
    assert shared.read_bytes(100_000) == 2048 * 2 * (512 + 64)


def test_layers_that_take_over_keys_stay_with_those_that_chose_them():
    model = model_of("glm-5.3")
    assert [i for i, follows in enumerate(model.follows) if not follows] == [0, 1, 2, *range(6, 78, 4)]
    plan = make_plan(model, ServingTarget(GPUS["h200"], 16), Split(8, 2))
    assert plan.ranks[1].first in range(6, 78, 4)
    with pytest.raises(DoesNotDivide, match="78 layers make 21 stages at most, and not 26"):
        make_plan(model, ServingTarget(GPUS["h200"], 26), Split(1, 26))


@pytest.mark.parametrize(("record", "name"), LARGE.items())
def test_records_of_large_models_fit_their_gpus_with_a_text_as_long_as_they_say(record, name, tmp_path):
    found = load_catalog(tmp_path)[record]
    stage = found.serving["gpu"].stages["decode"]
    # The repository of the record has 16 bits where Cloudflare's id says fp8.
    packed = "fp8" not in record and "fp8" not in name
    config = {key: value for key, value in published()[name].items() if key != "quantization_config" or packed}
    model = plan_model(name, config, [], item=2)
    gpu = GPUS["h200" if name.startswith(("kimi", "glm-5", "deepseek-v4")) else "h100"]
    asked = ServingTarget(
        gpu, stage.ranks, stage.gpu_memory_utilization * stage.num_gpus, stage.max_batch_tokens, stage.max_num_seqs,
        kv_cache_bytes=stage.kv_cache_bytes,
    )  # fmt: skip
    plan = make_plan(model, asked, Split(stage.tensor_parallel))
    assert plan.tokens >= found.properties.context_window <= model.context


def test_the_best_split_of_a_small_model_is_replicas_and_of_a_large_one_ranks():
    small = best_plan(model_of("gpt-oss-20b"), ServingTarget(GPUS["h100"], 4))
    assert (small.split.ranks, small.split.replicas) == (1, 4)
    large = best_plan(model_of("kimi-k2.5"), ServingTarget(GPUS["h200"], 8))
    assert large.split.ranks == 8 and large.rates.decode > large.rates.single
    with pytest.raises(DoesNotFit, match="kimi-k2.5 does not fit 4 x h100"):
        best_plan(model_of("kimi-k2.5"), ServingTarget(GPUS["h100"], 4))


def test_what_does_not_divide_is_named():
    with pytest.raises(DoesNotDivide, match="attention heads: 40 do not divide by 3"):
        make_plan(model_of("llama-4-scout"), ServingTarget(GPUS["h200"], 3), Split(3))


def test_ranks_that_would_cut_groups_of_codes_have_numbers():
    """2,880 columns of an expert make 90 groups of 32: codes for two ranks, and bfloat16 for four or whole experts."""
    model = model_of("gpt-oss-120b")
    asked = ServingTarget(GPUS["h200"], 4)
    experts = model.by_role()["experts"]
    held = {str(split): make_plan(model, asked, split).ranks[0].weights["experts"] for split in (
        Split(2), Split(4), Split(4, expert=True))}  # fmt: skip
    two, four, whole = held.values()
    assert two == pytest.approx(experts / 2, rel=0.01) and whole == pytest.approx(experts / 4, rel=0.01)
    assert four == pytest.approx(experts / 4 * 16 / 4.25, rel=0.02)
    told = [said(make_plan(model, asked, split)) for split in (Split(4), Split(2))]
    assert ["in 16 bits once they are loaded: experts\n" in text for text in told] == [True, False]


def test_what_is_unpacked_has_16_bits():
    """Of checkpoints in fp8 ranks keep experts' codes in blocks of 128 rows and columns, and nothing else."""
    for name, dense in (("llama-3.3-70b-instruct-fp8", True), ("qwen3-30b-a3b-fp8", False)):
        plan = make_plan(model_of(name), ServingTarget(GPUS["h200"], 2), Split(2))
        stored, held = model_of(name).by_role(), plan.ranks[0].weights
        kept = held["experts"] if not dense else held["mlp"] / 2
        assert kept == pytest.approx(stored["mlp" if dense else "experts"] / 2, rel=0.01)
        assert held["attention"] == pytest.approx(stored["attention"], rel=0.01)


def test_every_byte_of_a_rank_has_a_name():
    """What ranks hold adds up to the model, beside what each of them has; and a rank's memory to what it may use."""
    model = model_of("gpt-oss-120b")
    asked = ServingTarget(GPUS["h100"], 4)
    plan = make_plan(model, asked, Split(2, 2))
    held = sum(rank.weight_bytes for rank in plan.ranks) * 2
    copies = sum(rank.copies for rank in plan.ranks) * 2
    assert held - copies == pytest.approx(model.weight_bytes, rel=1e-4)
    for rank, left in zip(plan.ranks, plan.left, strict=True):
        assert rank.weight_bytes + rank.activations + asked.device.reserve + left == plan.usable
    found = to_json(plan)
    assert sum(found["weights"]["by_role"].values()) == found["weights"]["bytes"]
    text = said(plan)
    assert all(role in text for role in model.by_role()) and "streams" in text


def test_stages_work_at_the_same_time_and_prompts_choose_by_their_own_rate():
    """Which makes prompts faster and, where what a step takes depends on its rows, answers; but not one alone."""
    model, asked = model_of("llama-3.3-70b-instruct-fp8"), ServingTarget(GPUS["h200"], 4)
    model.stored_as = None  # the same bytes on any number of ranks
    whole, stages = (make_plan(model, asked, Split(1, n)) for n in (1, 2))
    assert stages.rates.prefill == pytest.approx(2 * whole.rates.prefill, rel=0.05)
    assert stages.rates.single == pytest.approx(whole.rates.single, rel=0.01)

    def answers(streams: int) -> list[float]:
        both = (whole, stages)
        return [rates(model, p.split, p.ranks, asked.device, streams=streams, context=8192).decode for p in both]

    few, many = answers(2), answers(400)
    assert few[1] == pytest.approx(few[0], rel=0.01)
    assert 1.5 * many[0] < many[1] < 2 * many[0]
    assert best_plan(model, asked).split.pipeline == 1
    prompts = best_plan(model, asked, prefill=True)
    others = (make_plan(model, asked, Split(n, 1, replicas=4 // n)) for n in (1, 2, 4))
    assert prompts.rates.prefill * prompts.split.replicas >= max(p.rates.prefill * p.split.replicas for p in others)


def test_prompts_are_faster_where_rows_travel_to_experts_on_many_ranks():
    model, gained = model_of("gpt-oss-120b"), {}
    for ranks in (2, 8):
        asked = ServingTarget(GPUS["h100"], ranks)
        all_rows, travel = (make_plan(model, asked, Split(ranks, 1, True, travel=way)) for way in (False, True))
        gained[ranks] = travel.rates.prefill / all_rows.rates.prefill
        # Answers are computed with all rows on every rank.
        assert travel.rates.decode == all_rows.rates.decode
    assert 0.99 < gained[2] < 1.03 < gained[8]
