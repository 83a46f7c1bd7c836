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
from serve_app.api.trace_context import TraceContext
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
    if protocol != "http/protobuf":
        log.warning(
            "OTEL_EXPORTER_OTLP_PROTOCOL=%s is not known here: use http/protobuf. No traces are exported", protocol
        )
        return Tracing()
    try:
        return Otlp()
    except ImportError as missing:
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s is not installed: pip install 'serve-app[otel]'. No traces are "
            "exported",
            missing.name,
        )
        return Tracing()


class Otlp(Tracing):
    """Records wait in the SDK's bounded queue, and become spans in its thread. Raises ImportError without the extra."""

    def __init__(self) -> None:
        from opentelemetry import trace as otel
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.proto.resource.v1.resource_pb2 import Resource as Sent
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.sampling import Decision

        from serve_app.gateway.tracing.spans import Ended, export_request

        about = {"service.version": __version__, "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
        found = Resource.create(about)
        if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
            found = found.merge(Resource({"service.name": "serve-app"}))
        sent = Sent()
        for name, value in found.attributes.items():
            sent.attributes.add(key=name).value.string_value = str(value)

        class Sender(OTLPSpanExporter):
            """Takes records for spans; endpoint, headers, retries and the rest are the library's."""

            def export(self, spans: Any) -> SpanExportResult:
                done = self._client.export(export_request(spans, sent).SerializeToString())
                return SpanExportResult.SUCCESS if done.success else SpanExportResult.FAILURE

        self._otel, self._sample, self._record = otel, Decision.RECORD_AND_SAMPLE, Ended
        # The provider reads OTEL_TRACES_SAMPLER; the processor OTEL_BSP_*.
        self._sampler = TracerProvider(resource=found).sampler
        self._processor = BatchSpanProcessor(Sender())
        self._flags = otel.TraceFlags(otel.TraceFlags.SAMPLED)

    def sampled(self, request_id: str, known: TraceContext | None) -> bool:
        return self._sampled(int(request_id if known is None else known.trace_id, 16), self._parent(known))

    def ended(self, trace: Trace) -> None:
        try:
            own_id, trace_id = int(trace.id[:16], 16), int(trace.trace_id, 16)
        except ValueError:
            # An id from elsewhere may be anything.
            return
        parent = self._parent(trace.context)
        if not own_id or not 0 < trace_id < 1 << 128 or not self._sampled(trace_id, parent):
            return
        state = None if parent is None else parent.trace_state
        own = self._otel.SpanContext(trace_id, own_id, False, self._flags, state)
        record = self._record(own, parent, trace.body, trace.account, trace.task)
        self._processor.on_end(record)  # type: ignore[arg-type]

    def _sampled(self, trace_id: int, parent: Any) -> bool:
        context = None
        if parent is not None:
            context = self._otel.set_span_in_context(self._otel.NonRecordingSpan(parent))
        return self._sampler.should_sample(context, trace_id, "request").decision is self._sample

    def _parent(self, known: TraceContext | None) -> Any:
        """The client's span."""
        if known is None:
            return None
        flags = self._flags if known.sampled else self._otel.TraceFlags(0)
        state = self._otel.TraceState.from_header([known.state]) if known.state else None
        return self._otel.SpanContext(int(known.trace_id, 16), int(known.parent_id, 16), True, flags, state)

    def flush(self) -> bool:
        """Sends what waits; for tests and benchmarks."""
        return self._processor.force_flush()

    def close(self) -> None:
        ending = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_S)
