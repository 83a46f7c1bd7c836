"""Prices and costs are exact: units, rounding, dates, currencies, discounts."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app.catalog import load_catalog
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.price_list import Prices, read_price_list
from serve_app.catalog.pricing import UNIT_NAMES, UNITS, Price, Rates
from serve_app.catalog.search import search_record
from serve_app.state.store.tables import UNIT_COLUMNS


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
        {"unit": "per M input tokens", "price": 0.66, "currency": "USD", "neurons": 60000.0},
        {"unit": "per M output tokens", "price": 1.0, "currency": "USD", "neurons": 90909.0},
    ]
    own = catalog["@cf/pico/pico-instruct"].price
    assert own is not None and own.cached == Decimal("0.001") and own.neuron_rates.cached == 91
