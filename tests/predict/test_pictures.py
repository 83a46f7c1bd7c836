"""Files to what a model sees."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.predict import pictures
from serve_app.predict.pictures import Pictures
from serve_app.predict.predictor import Place
from tests import sight


@pytest.mark.parametrize(("bound", "at_once"), [(64, 1), (1 << 20, 4)])
def test_large_pictures_are_prepared_one_after_the_other(monkeypatch, tmp_path, bound, at_once):
    """Since a processor takes many times a picture's bytes; small ones are prepared together."""
    monkeypatch.setattr(pictures, "LARGE_PIXELS", bound)
    found = Pictures(Place(sight.write(tmp_path / "llava", "llava")))
    processor, lock, inside, most = found.processor, threading.Lock(), 0, 0
    together = threading.Barrier(at_once)

    def counted(**options):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(30)
        time.sleep(0.01)
        made = processor(**options)
        with lock:
            inside -= 1
        return made

    found.processor = counted
    try:
        with ThreadPoolExecutor(4) as threads:
            items = list(threads.map(found.item, [sight.picture(40, 30, seed) for seed in range(4)]))
    finally:
        found.close()
    assert most == at_once and len(items) == 4
