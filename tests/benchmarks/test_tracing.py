"""The benchmark of what exporting traces costs: figures when all spans have arrived, and none when some have not."""

from __future__ import annotations

import pytest

from benchmarks.gateway import tracing
from serve_app.gateway.tracing import export
from tests.gateway.test_tracing import Receiver, receiver  # noqa: F401


def counts(receiver: Receiver) -> dict[str, int]:  # noqa: F811
    found: dict[str, int] = {}
    for span in receiver.spans:
        found[span.name] = found.get(span.name, 0) + 1
    return found


def test_figures_come_with_all_spans_only(receiver, monkeypatch):  # noqa: F811
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_BSP_MAX_QUEUE_SIZE"):
        monkeypatch.setenv(name, "")
    found = tracing.measure(40, 2, 0.5, receiver.url, lambda: counts(receiver), 340.0)
    assert found["spans"] == round(5 * 120 * found["sampled"]) and found["process_us"] > 0
    receiver.spans.clear()
    kept = export.Otlp.ended
    monkeypatch.setattr(export.Otlp, "ended", lambda self, trace: trace.id[0] < "2" and kept(self, trace))
    with pytest.raises(SystemExit, match="no figures"):
        tracing.measure(40, 2, 0.5, receiver.url, lambda: counts(receiver), 340.0)
