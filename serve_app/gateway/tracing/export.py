"""Who is told of requests that have ended: an OTLP exporter behind a bounded queue, by OpenTelemetry's variables.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. An exporter that is away costs spans and nothing else.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from serve_app import __version__
from serve_app.api.trace_context import TraceContext
from serve_app.gateway.tracing.sampling import sampler
from serve_app.state.kept.traces import Trace

log = logging.getLogger("ray.serve")

# Of a request, by whose id its span is called; and its trace, where its client has named none.
_SPAN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}")
_TRACE_ID = re.compile(r"(?!0{16})[0-9a-f]{32}")

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

    def refused(self, request_id: str, known: TraceContext | None, told: Mapping[str, Any], seconds: float) -> None:
        """A request was refused before anything of it was begun, just now; ``told``: attributes of its span."""

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
        return Otlp(environ)
    except ImportError as missing:
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s is not installed: pip install 'serve-app[otel]'. No traces are "
            "exported",
            missing.name,
        )
        return Tracing()


class Otlp(Tracing):
    """Records wait in the SDK's bounded queue, and become spans in its thread. Raises ImportError without the extra."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.proto.resource.v1.resource_pb2 import Resource as Sent
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

        from serve_app.gateway.tracing.spans import Ended, Refused, export_request

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

        self._ended, self._refused = Ended, Refused
        self._sampled = sampler(environ)
        # It reads OTEL_BSP_*.
        self._processor = BatchSpanProcessor(Sender())

    def sampled(self, request_id: str, known: TraceContext | None) -> bool:
        return self._sampled(request_id if known is None else known.trace_id, known)

    def ended(self, trace: Trace) -> None:
        known = trace.context
        try:
            sampled = self.sampled(trace.id, known)
        except ValueError:
            # An id from elsewhere may be anything.
            return
        if sampled and (_TRACE_ID.fullmatch(trace.id) if known is None else _SPAN_ID.match(trace.id)):
            found = self._ended(trace.id, known, trace.body, trace.account, trace.task)
            self._processor.on_end(found)  # type: ignore[arg-type]

    def refused(self, request_id: str, known: TraceContext | None, told: Mapping[str, Any], seconds: float) -> None:
        if self.sampled(request_id, known):
            self._processor.on_end(self._refused(request_id, known, told, time.time(), seconds))  # type: ignore[arg-type]

    def flush(self) -> bool:
        """Sends what waits; for tests and benchmarks."""
        return self._processor.force_flush()

    def close(self) -> None:
        ending = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_S)
