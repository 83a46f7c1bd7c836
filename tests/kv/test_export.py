from __future__ import annotations

import threading

import numpy as np
import pytest

from serve_app.kv.export import ExportBuffer


def array(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


def test_taken_once():
    buffer = ExportBuffer(100)
    data = array(10)
    assert buffer.put("a", data)
    assert buffer.take("a") is data
    with pytest.raises(KeyError):
        buffer.take("a")
    assert buffer.nbytes == 0


def test_oldest_goes_when_full_and_too_large_is_refused():
    buffer = ExportBuffer(100)
    for name in "abc":
        assert buffer.put(name, array(40))
    assert len(buffer) == 2 and buffer.nbytes == 80
    with pytest.raises(KeyError):
        buffer.take("a")
    assert not buffer.put("d", array(101))
    assert len(buffer) == 2


def test_what_nobody_takes_expires():
    now = [0.0]
    buffer = ExportBuffer(100, ttl_s=5, clock=lambda: now[0])
    buffer.put("a", array(10))
    now[0] = 6.0
    buffer.put("b", array(10))
    assert len(buffer) == 1
    buffer.put("b", array(20))
    assert buffer.nbytes == 20
    buffer.discard(["b", "zzz"])
    assert buffer.nbytes == 0


def test_what_is_on_its_way_is_bounded():
    buffer = ExportBuffer(100)
    assert buffer.begin(60) and not buffer.begin(60) and buffer.dropped == 1
    released = threading.Timer(0.05, buffer.end, (60,))
    released.start()
    assert buffer.begin(60, wait_s=30)
    buffer.end(60)
    released.join()
    assert buffer.begin(100)
