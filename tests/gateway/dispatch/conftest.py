"""A dispatcher of the chat model, on a clock of its own."""

from __future__ import annotations

from pathlib import Path as File

import pytest

from serve_app.catalog.load import load_catalog
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.tasks.model import ServedModel
from tests.gateway.dispatch.waiting import CHAT, Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def model():
    catalog = load_catalog()
    return ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), File("/nonexistent"))


@pytest.fixture
def dispatcher(model, clock):
    return Dispatcher(model, clock)
