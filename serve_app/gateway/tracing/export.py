"""Who is told of requests that have ended: an OTLP exporter behind a bounded queue, by OpenTelemetry's variables.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. An exporter that is away costs spans and nothing else.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from serve_app import __version__
from serve_app.api.trace_context import TraceContext, span_id_of
from serve_app.state.traces import Trace

log = logging.getLogger("ray.serve")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# For what is left when the gateway ends.
LAST_S = 2.0


class Tracing:
    """Off: nothing is sampled, and nothing is kept."""

    def sampled(self, request_id: str, known: TraceContext | None) -> bool:
        """Whether the request's spans are exported."""
        return False

    def ended(self, trace: Trace) -> None:
        """A request has ended."""

    def close(self) -> None:
        """Sends what is left, for seconds at most."""


def tracing(environ: Mapping[str, str] = os.environ) -> Tracing:
    """As the environment says."""
    exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    wanted = any(environ.get(each) for each in ENDPOINTS) or "OTEL_TRACES_EXPORTER" in environ
    if not wanted or exporters == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Tracing()
    if exporters != "otlp":
        log.warning("OTEL_TRACES_EXPORTER=%s is not known here: use otlp or none. No traces are exported", exporters)
        return Tracing()
    protocol = next((environ[each] for each in PROTOCOLS if environ.get(each)), "http/protobuf")
    try:
        return Otlp(_exporter(protocol))
    except ImportError as missing:
        kind = "grpc" if protocol == "grpc" else "http"
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s is not installed: pip install 'serve-app[otel]'%s. No traces "
            "are exported",
            missing.name,
            " opentelemetry-exporter-otlp-proto-grpc" if kind == "grpc" else "",
        )
        return Tracing()


def _exporter(protocol: str) -> Any:
    """Raises ImportError where it is not installed."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # type: ignore

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class Otlp(Tracing):
    """``exporter``: of spans. Records wait in the SDK's bounded queue, and become spans in its thread."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        from serve_app.gateway.tracing.spans import spans_of

        about = {"service.version": __version__, "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
        found = Resource.create(about)
        if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
            found = found.merge(Resource({"service.name": "serve-app"}))

        class Converting(SpanExporter):
            """Takes records for spans."""

            def export(self, spans: Any) -> Any:
                return exporter.export([span for ended in spans for span in spans_of(ended, found)])

            def shutdown(self) -> None:
                exporter.shutdown()

            def force_flush(self, timeout_millis: int = 30000) -> bool:
                return exporter.force_flush(timeout_millis)

        # The provider reads OTEL_TRACES_SAMPLER; the processor OTEL_BSP_*.
        self._sampler = TracerProvider(resource=found).sampler
        self._processor = BatchSpanProcessor(Converting())

    def sampled(self, request_id: str, known: TraceContext | None) -> bool:
        from opentelemetry import trace as otel
        from opentelemetry.sdk.trace.sampling import Decision

        parent = _parent(known)
        context = None if parent is None else otel.set_span_in_context(otel.NonRecordingSpan(parent))
        trace_id = int(request_id if known is None else known.trace_id, 16)
        result = self._sampler.should_sample(context, trace_id, "request", otel.SpanKind.SERVER)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def ended(self, trace: Trace) -> None:
        known = trace.context
        # Ids of requests from elsewhere may be anything.
        if not (_is_id(trace.id) and self.sampled(trace.id, known)):
            return
        from opentelemetry.trace import SpanContext, TraceFlags

        from serve_app.gateway.tracing.spans import Ended

        parent = _parent(known)
        trace_id = int(trace.id if known is None else known.trace_id, 16)
        state = None if parent is None else parent.trace_state
        own = SpanContext(trace_id, int(span_id_of(trace.id), 16), False, TraceFlags(TraceFlags.SAMPLED), state)
        self._processor.on_end(Ended(own, parent, trace.body, trace.account, trace.task))  # type: ignore[arg-type]

    def flush(self) -> bool:
        """Sends what waits; for tests and benchmarks."""
        return self._processor.force_flush()

    def close(self) -> None:
        ending = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_S)


def _is_id(text: str) -> bool:
    try:
        return len(text) == 32 and int(text, 16) > 0 and int(text[:16], 16) > 0
    except ValueError:
        return False


def _parent(known: TraceContext | None) -> Any:
    """The client's span."""
    if known is None:
        return None
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    flags = TraceFlags(TraceFlags.SAMPLED if known.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([known.state]) if known.state else None
    return SpanContext(int(known.trace_id, 16), int(known.parent_id, 16), True, flags, state)
