"""Cloudflare's price table, row by row as its page has it, recomputed here with decimals and nothing of the product.

Source: developers.cloudflare.com/workers-ai/platform/pricing, as of 2026-08-28; ids are those of the page. What the
page has in neurons is what counts; its dollars are the same, rounded to a few digits.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import pytest

from serve_app.catalog.price_list import Prices, built_in

# Dollars, then neurons, per million tokens: in, cached, out.
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
google/gemma-4-26b-a4b-it | .10 | | .30 | 9091 | | 27273
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
nvidia/nemotron-3-120b-a12b | .5 | | 1.5 | 45455 | | 136364
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
# What the page has in other units: a unit as entries have it, how many of it the price is for, neurons, and dollars.
OTHERS: dict[str, list[tuple[str, int, str, str]]] = {
    "huggingface/distilbert-sst-2-int8": [("input_tokens", 10**6, "2394", "0.026")],
    "baai/bge-reranker-base": [("input_tokens", 10**6, "283", "0.003")],
    "meta/m2m100-1.2b": [("input_tokens", 10**6, "31050", "0.342"), ("output_tokens", 10**6, "31050", "0.342")],
    "ai4bharat/indictrans2-en-indic-1B": [
        ("input_tokens", 10**6, "31050", "0.342"),
        ("output_tokens", 10**6, "31050", "0.342"),
    ],
    "moondream/moondream3.1-9B-A2B": [
        ("input_tokens", 10**6, "27273", "0.300"),
        ("output_tokens", 10**6, "90909", "1.000"),
    ],
    "cloudflare/clef": [("input_tokens", 10**6, "21818", "0.24")],
    "microsoft/resnet-50": [("images", 10**6, "228055", "2.51")],
    "black-forest-labs/flux-1-schnell": [
        ("image_tiles", 1, "4.80", "0.0000528"),
        ("image_steps", 1, "9.60", "0.0001056"),
    ],
    "leonardo/lucid-origin": [("image_tiles", 1, "636", "0.006996"), ("image_steps", 1, "12", "0.000132")],
    "leonardo/phoenix-1.0": [("image_tiles", 1, "530", "0.005830"), ("image_steps", 1, "10", "0.000110")],
    "black-forest-labs/flux-2-dev": [
        ("input_tile_steps", 1, "18.75", "0.00021"),
        ("image_tile_steps", 1, "37.50", "0.00041"),
    ],
    "black-forest-labs/flux-2-klein-4b": [
        ("input_tiles", 1, "5.37", "0.000059"),
        ("image_tiles", 1, "26.05", "0.000287"),
    ],
    "black-forest-labs/flux-2-klein-9b": [
        ("first_pixels", 1024 * 1024, "1363.64", "0.015"),
        ("further_pixels", 1024 * 1024, "181.82", "0.002"),
    ],
    "openai/whisper": [("audio_ms", 60_000, "41.14", "0.0005")],
    "openai/whisper-large-v3-turbo": [("audio_ms", 60_000, "46.63", "0.0005")],
    "myshell-ai/melotts": [("audio_ms", 60_000, "18.63", "0.0002")],
    "deepgram/nova-3": [("audio_ms", 60_000, "472.73", "0.0052"), ("streamed_audio_ms", 60_000, "836.36", "0.0092")],
    "deepgram/flux": [("streamed_audio_ms", 60_000, "700.00", "0.0077")],
    # The page's dollars, 0.00033795, are another price; what is billed is neurons.
    "pipecat-ai/smart-turn-v2": [("audio_ms", 60_000, "0.51", "0.00000561")],
    "deepgram/aura-1": [("characters", 1000, "1363.64", "0.015")],
    "deepgram/aura-2-en": [("characters", 1000, "2727.27", "0.030")],
    "deepgram/aura-2-es": [("characters", 1000, "2727.27", "0.030")],
}
TABLE = Prices(built_in())
DOLLARS_PER_NEURON = Decimal("0.011") / 1000


def whole(amount: Decimal) -> int:
    return int(amount.to_integral_value(ROUND_HALF_EVEN))


def same(neurons: str, dollars: str) -> bool:
    """Whether a price in neurons is the page's in dollars, as far as the page writes it out."""
    last = Decimal(1).scaleb(Decimal(dollars).as_tuple().exponent)  # type: ignore[arg-type]
    return abs(Decimal(neurons) * DOLLARS_PER_NEURON - Decimal(dollars)) <= last / 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_tokens_cost_what_the_page_says(row: list[str]) -> None:
    model, dollars, neurons = row[0], row[1:4], row[4:7]
    used = {"input_tokens": 12_345, "cached_tokens": 2_345, "output_tokens": 678}

    def total(each: list[str], scale: int) -> int:
        first, cached, out = Decimal(each[0]), Decimal(each[1] or each[0]), Decimal(each[2] or 0)
        return whole((10_000 * first + 2_345 * cached + 678 * out) * scale / 10**6)

    cost = TABLE.price_of(f"@cf/{model}", 0).cost(used)
    assert (cost.neurons, cost.money, cost.currency) == (total(neurons, 10**6), total(dollars, 10**9), "USD")
    # The page agrees with itself: $0.011 for a thousand neurons, to three digits.
    for d, n in zip(dollars, neurons, strict=True):
        assert bool(d) == bool(n) and (not d or same(n, d.ljust(4, "0") if "." in d else f"{d}.000")), (d, n)


@pytest.mark.parametrize("model", OTHERS)
def test_other_units_cost_what_the_page_says(model: str) -> None:
    quote = TABLE.price_of(f"@cf/{model}", 0)
    used = {unit: 7 * (number + 1) * 1001 for number, (unit, *_) in enumerate(OTHERS[model])}
    cost = quote.cost(used)
    neurons = sum((used[unit] * Decimal(each) / per for unit, per, each, _ in OTHERS[model]), Decimal(0))
    assert cost.neurons == whole(neurons * 10**6)
    for unit, per, each, dollars in OTHERS[model]:
        money = Decimal(quote.cost({unit: per * 1000}).money) / 1000 / 10**9
        assert same(each, dollars), (unit, each, dollars)
        assert abs(money - Decimal(dollars)) <= abs(Decimal(each) * DOLLARS_PER_NEURON - Decimal(dollars)), unit


def test_the_table_has_the_pages_rows_and_no_other() -> None:
    assert set(built_in()) == {f"@cf/{row[0]}" for row in ROWS} | {f"@cf/{model}" for model in OTHERS}
