"""Prices and costs are exact: Cloudflare's table recomputed by hand, dates, currencies, discounts."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app.catalog import load_catalog
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.price_list import Prices, built_in, read_price_list
from serve_app.catalog.pricing import UNIT_NAMES, UNITS, Price, Rates
from serve_app.catalog.search import search_record
from serve_app.state.store.tables import UNIT_COLUMNS

# Rows of the page, dollars and neurons per million tokens: in, cached, out.
TEXT = """
meta/llama-3.2-1b-instruct | .027 | | .201 | 2457 | | 18252
meta/llama-3.2-3b-instruct | .051 | | .335 | 4625 | | 30475
meta/llama-3.1-8b-instruct-fp8-fast | .045 | | .384 | 4119 | | 34868
meta/llama-3.2-11b-vision-instruct | .049 | | .676 | 4410 | | 61493
meta/llama-3.1-70b-instruct-fp8-fast | .293 | | 2.253 | 26668 | | 204805
meta/llama-3.3-70b-instruct-fp8-fast | .293 | | 2.253 | 26668 | | 204805
meta/llama-3.1-8b-instruct | .282 | | .827 | 25608 | | 75147
meta/llama-3-8b-instruct | .282 | | .827 | 25608 | | 75147
meta/llama-3.1-8b-instruct-fp8 | .152 | | .287 | 13778 | | 26128
meta/llama-3.1-8b-instruct-awq | .123 | | .266 | 11161 | | 24215
meta/llama-3-8b-instruct-awq | .123 | | .266 | 11161 | | 24215
meta/llama-2-7b-chat-fp16 | .556 | | 6.667 | 50505 | | 606061
meta/llama-guard-3-8b | .484 | | .030 | 44003 | | 2730
meta/llama-4-scout-17b-16e-instruct | .27 | | .85 | 24545 | | 77273
deepseek-ai/deepseek-r1-distill-qwen-32b | .497 | | 4.881 | 45170 | | 443756
deepseek-ai/deepseek-v4-flash-0731 | .44 | .014 | 1.32 | 40000 | 1273 | 120000
deepseek-ai/deepseek-v4-pro-0813 | 1.32 | .044 | 3.96 | 120000 | 4000 | 360000
mistral/mistral-7b-instruct-v0.1 | .11 | | .19 | 10000 | | 17300
mistralai/mistral-small-3.1-24b-instruct | .351 | | .555 | 31876 | | 50488
google/gemma-3-12b-it | .345 | | .556 | 31371 | | 50560
google/gemma-4-26b | .10 | | .30 | 9091 | | 27273
aisingapore/gemma-sea-lion-v4-27b-it | .351 | | .555 | 31876 | | 50488
qwen/qwq-32b | .66 | | 1.0 | 60000 | | 90909
qwen/qwen2.5-coder-32b-instruct | .66 | | 1.0 | 60000 | | 90909
qwen/qwen3-30b-a3b-fp8 | .051 | | .335 | 4625 | | 30475
qwen/qwen3.8-27b | .45 | | 3.2 | 40909 | | 290909
openai/gpt-oss-120b | .35 | | .75 | 31818 | | 68182
openai/gpt-oss-20b | .2 | | .3 | 18182 | | 27273
ibm-granite/granite-4.0-h-micro | .017 | | .112 | 1542 | | 10158
zai-org/glm-4.7-flash | .06 | | .40 | 5500 | | 36400
zai-org/glm-5.2 | 1.4 | .26 | 4.4 | 127273 | 23636 | 400000
zai-org/glm-5.3 | 1.4 | .26 | 4.4 | 127273 | 23636 | 400000
zai-org/glm-5.3-flash | .15 | .03 | .5 | 13636 | 2727 | 45455
nvidia/nemotron-3-120b | .5 | | 1.5 | 45455 | | 136364
moonshotai/kimi-k2.5 | .6 | .1 | 3 | 54545 | 9091 | 272727
moonshotai/kimi-k2.6 | .95 | .16 | 4 | 86364 | 14545 | 363636
moonshotai/kimi-k2.7-code | .95 | .19 | 4 | 86364 | 17273 | 363636
baai/bge-small-en-v1.5 | .020 | | | 1841 | |
baai/bge-base-en-v1.5 | .067 | | | 6058 | |
baai/bge-large-en-v1.5 | .204 | | | 18582 | |
baai/bge-m3 | .012 | | | 1075 | |
pfnet/plamo-embedding-1b | .019 | | | 1689 | |
qwen/qwen3-embedding-0.6b | .012 | | | 1075 | |
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TEXT.strip().splitlines()]
# What the page has in other units: a model, what was used, and its neurons.
OTHERS = [
    ("huggingface/distilbert-sst-2-int8", {"input_tokens": 10**6}, "2394"),
    ("baai/bge-reranker-base", {"input_tokens": 10**6}, "283"),
    ("meta/m2m100-1.2b", {"input_tokens": 10**6, "output_tokens": 10**6}, "62100"),
    ("moondream/moondream3.1", {"input_tokens": 10**6, "output_tokens": 10**6}, "118182"),
    ("clef", {"input_tokens": 10**6}, "21818"),
    ("microsoft/resnet-50", {"images": 10**6}, "228055"),
    ("black-forest-labs/flux-1-schnell", {"image_tiles": 4, "image_steps": 4}, "57.6"),
    ("leonardo/lucid-origin", {"image_tiles": 2, "image_steps": 10}, "1392"),
    ("leonardo/phoenix-1.0", {"image_tiles": 2, "image_steps": 10}, "1160"),
    ("black-forest-labs/flux-2-dev", {"input_tile_steps": 4, "image_tile_steps": 8}, "375"),
    ("black-forest-labs/flux-2-klein-4b", {"input_tiles": 4, "image_tiles": 4}, "125.68"),
    ("black-forest-labs/flux-2-klein-9b", {"first_pixels": 10**6, "further_pixels": 500_000}, "1454.55"),
    ("openai/whisper", {"audio_ms": 90_000}, "61.71"),
    ("openai/whisper-large-v3-turbo", {"audio_ms": 60_000}, "46.63"),
    ("myshell-ai/melotts", {"audio_ms": 60_000}, "18.63"),
    ("deepgram/nova-3", {"audio_ms": 60_000, "streamed_audio_ms": 60_000}, "1309.09"),
    ("deepgram/flux", {"streamed_audio_ms": 1_000}, "11.666667"),
    ("pipecat-ai/smart-turn-v2", {"audio_ms": 60_000}, "0.51"),
    ("deepgram/aura-1", {"characters": 500}, "681.82"),
    ("deepgram/aura-2-en", {"characters": 1}, "2.72727"),
]
TABLE = Prices(built_in())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_text_costs_what_the_table_says(row: list[str]) -> None:
    model, d_in, d_cached, d_out, n_in, n_cached, n_out = row
    used = {"input_tokens": 12_345, "cached_tokens": 2_345, "output_tokens": 678}
    counts = (10_000, 2_345, 678)

    def total(each: tuple[str, str, str], scale: int) -> int:
        first, cached, out = each[0], each[1] or each[0], each[2] or "0"
        found = sum(count * Decimal(rate) for count, rate in zip(counts, (first, cached, out), strict=True)) / 10**6
        return int((found * scale).to_integral_value(ROUND_HALF_EVEN))

    cost = TABLE.price_of(f"@cf/{model}", 0).cost(used)
    assert cost.neurons == total((n_in, n_cached, n_out), 10**6)
    assert cost.money == total((d_in, d_cached, d_out), 10**9) and cost.currency == "USD"


@pytest.mark.parametrize(
    ("model", "used", "neurons"), OTHERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_other_units_cost_what_the_table_says(model: str, used: dict[str, int], neurons: str) -> None:
    quote = TABLE.price_of(f"@cf/{model}", 0)
    cost = quote.cost(used)
    assert cost.neurons == Decimal(neurons) * 10**6
    # What has neurons only costs what these do.
    if model not in ("clef", "baai/bge-reranker-base", "deepgram/flux"):
        assert cost.money == int((Decimal(neurons) * 11_000).to_integral_value(ROUND_HALF_EVEN))


def test_the_table_has_no_row_that_is_not_checked_here() -> None:
    checked = {f"@cf/{row[0]}" for row in ROWS} | {f"@cf/{model}" for model, _, _ in OTHERS}
    assert set(built_in()) - checked == {"@cf/ai4bharat/indictrans2-en-indic-1B", "@cf/deepgram/aura-2-es"}


def test_units_of_prices_are_those_of_the_ledger() -> None:
    assert UNIT_NAMES == UNIT_COLUMNS
    assert {unit.key for unit in UNITS} == set(Rates.model_fields)


def test_neurons_follow_from_dollars_as_cloudflare_rounds_them() -> None:
    # Dollar and neuron columns of Cloudflare's table, models whose dollar column is not rounded.
    for dollars, stated in ((0.11, 10000), (0.66, 60000), (0.20, 18182), (0.35, 31818), (1.4, 127273)):
        assert Price(input=dollars).neuron_rates.input == stated


def test_costs_are_rounded_once_and_half_to_even() -> None:
    """Half a micro-neuron a token: one token costs nothing, and three cost two of them."""
    tariff = Prices({"m": Price(neurons=Rates(input="0.5", output="1.5"))}).price_of("m", 0)
    assert [tariff.cost({"input_tokens": n}).neurons for n in (1, 2, 3, 5)] == [0, 1, 2, 2]
    assert tariff.cost({"input_tokens": 1, "output_tokens": 1}).neurons == 2
    # Sums stay exact where floats would not be.
    assert Prices({"m": Price(input=0.1)}).price_of("m", 0).cost({"input_tokens": 3 * 10**15}).money == 3 * 10**17
    assert tariff.cost({}) == tariff.cost({"images": 7, "what nobody knows": 1}) == Prices().price_of("m", 0).cost({})


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), True, "much", [1]])
def test_what_is_no_price_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError, match="is no price"):
        Price(input=bad)


LIST = """
currency: EUR
per_dollar: 0.5
prices:
  - {model: "@cf/meta/*", from: 2026-01-01, input: 2, output: 4}
  - {model: "@cf/meta/llama-3.2-1b-instruct", from: 2026-01-01, input: 3, cached: 1, output: 6}
  - {model: "@cf/meta/llama-3.2-1b-instruct", from: "2026-02-01T12:00:00Z", input: 9, neurons: {input: 7, output: 8}}
discounts:
  - {batch: 0.5}
  - {from: 2026-03-01, cached: 0.75, batch: 0.25}
"""
JANUARY, FEBRUARY, MARCH = 1_767_225_600, 1_769_947_200, 1_772_323_200


def test_an_operators_list_goes_before_the_catalogue_from_its_dates_on(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(LIST)
    catalog = load_catalog(tmp_path)
    prices = catalog.prices(read_price_list(file))
    used = {"input_tokens": 10**6, "cached_tokens": 10**6 // 2, "output_tokens": 10**6}
    llama, other = "@cf/meta/llama-3.2-1b-instruct", "@cf/qwen/qwq-32b"

    def money(model: str, at: float, **more: bool) -> Fraction:
        cost = prices.price_of(model, at).cost(used, **more)
        assert cost.currency == "EUR" == prices.currency
        return Fraction(cost.money, 10**9)

    # The catalogue's dollars, in the list's currency, until the list names the model.
    assert money(llama, JANUARY - 1) == Fraction(228, 2000) and money(other, JANUARY) == Fraction(166, 200)
    assert (
        money(llama, JANUARY) == Fraction(3, 2) + Fraction(1, 2) + 6
    )  # it names the model; the pattern does not count
    assert money("@cf/meta/llama-3.2-3b-instruct", JANUARY) == 6
    assert money(llama, FEBRUARY - 1) == 8 and money(llama, FEBRUARY) == 9
    assert money(llama, FEBRUARY - 1, batch=True) == 4 and money(llama, MARCH, batch=True) == 9 * Fraction(
        3, 4
    ) * Fraction(5, 8)
    # Neurons stay the table's until the list states others; both have the discounts.
    assert prices.price_of(llama, JANUARY).cost(used).neurons == (2457 + 18252) * 10**6
    assert prices.price_of(llama, FEBRUARY).cost(used).neurons == 15 * 10**6
    assert prices.price_of(other, MARCH).cost(used).neurons == (30000 + 7500 + 90909) * 10**6


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prices: [{model: m, input: -1}]", "prices.0.input: -1 is no price"),
        ("prices: [{model: m, form: 2026-01-01}]", "unknown key"),
        ("prices: [{model: m, from: soon}]", "'soon' is no date. Write it as 2026-12-01"),
        ("discounts: [{batch: 2}]", "discounts.0.batch"),
        ("currency: euro", "currency"),
        ("a: [", "cannot be read"),
        ("- 1", "a price list is a mapping"),
    ],
)
def test_a_wrong_list_is_refused_with_a_remedy(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(CatalogError, match=told):
        read_price_list(file)
    with pytest.raises(CatalogError, match="no such file"):
        read_price_list(tmp_path / "nowhere.yaml")


def test_records_have_their_own_price_or_the_tables() -> None:
    catalog = load_catalog()
    shown = {row["property_id"]: row["value"] for row in search_record(catalog["@cf/qwen/qwq-32b"])["properties"]}
    assert shown["price"] == [
        {"unit": "per M input tokens", "price": 0.66, "currency": "USD"},
        {"unit": "per M output tokens", "price": 1.0, "currency": "USD"},
    ]
    own = catalog["@cf/pico/pico-instruct"].price
    assert own is not None and own.cached == Decimal("0.001") and own.neuron_rates.cached == 91
