"""A price list that changes under a running program: taken over when it is at rest, refused when it is wrong."""

from __future__ import annotations

import logging
import os
from decimal import Decimal
from pathlib import Path

import pytest

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.price_file import PriceFile
from serve_app.catalog.price_list import PriceList

GOOD = "prices: [{model: m, input: 1}]"
OTHER = "currency: EUR\nprices: [{model: m, input: 2}]"


def looked(file: PriceFile) -> PriceList | None:
    """What comes of two looks."""
    file.changed()
    return file.take() if file.changed() else None


def put(path: Path, text: str) -> None:
    """As a careful editor writes: the file is never half there."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_change_is_taken_once_and_only_when_it_is_at_rest(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    file = PriceFile(tmp_path)
    assert file.begin().prices[0].input == 1
    assert looked(file) is None
    # An editor empties the file before it writes: what is seen once may be half of it.
    path.write_text("")
    assert not file.changed()
    path.write_text(OTHER)
    assert not file.changed() and file.changed()
    found = file.take()
    assert found is not None and (found.currency, found.prices[0].input) == ("EUR", Decimal(2))
    assert not file.changed() and not file.changed()


def test_a_wrong_list_is_refused_once_and_told_until_it_is_right(tmp_path, caplog):
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    file = PriceFile(tmp_path)
    file.begin()
    put(path, "prices: [{model: m, input: -1}]")
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        assert looked(file) is None and looked(file) is None
    [line] = caplog.messages
    assert "the one before it goes on" in line and "prices.0.input: -1 is no price" in line and str(path) in line
    assert "-1 is no price" in file.problem
    put(path, OTHER)
    assert looked(file) == PriceFile(tmp_path).read() and file.problem == ""


def test_who_starts_while_the_list_is_wrong_has_the_one_in_use(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("a: [")
    with pytest.raises(CatalogError, match="cannot be read"):
        PriceFile(tmp_path).begin()
    put(path, GOOD)
    PriceFile(tmp_path).begin()
    put(path, "a: [")
    later = PriceFile(tmp_path)
    assert later.begin().prices[0].input == 1 and "cannot be read" in later.problem
    # The command line is stricter.
    with pytest.raises(CatalogError, match="cannot be read"):
        later.read()
    put(path, OTHER)
    found = looked(later)
    assert found is not None and found.currency == "EUR"


def test_a_list_that_goes_leaves_the_catalogues_prices_unless_it_was_named(tmp_path):
    path = tmp_path / "prices.yaml"
    file, other = PriceFile(tmp_path), tmp_path / "other.yaml"
    assert file.begin() == PriceList()
    put(path, GOOD)
    put(other, OTHER)
    named = PriceFile(tmp_path, other)
    named.begin()
    found = looked(file)
    assert found is not None and len(found.prices) == 1
    path.unlink()
    other.unlink()
    assert looked(file) == PriceList() and PriceFile(tmp_path).begin() == PriceList()
    assert looked(named) is None and "no such file" in named.problem
