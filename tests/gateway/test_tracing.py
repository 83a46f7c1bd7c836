"""Traces as a real OTLP receiver gets them: over HTTP, read by opentelemetry-proto."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve_app.api.trace_context import read_traceparent
from serve_app.gateway.tracing.export import Otlp, Tracing, tracing
from serve_app.state.kept.traces import Trace
from tests.tasks.conftest import ACCOUNT, record, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it is sent, by trace and name; ``status``: what it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, trace_id: str = "") -> dict[str, Any]:
        return {span.name: span for span in self.spans if trace_id in ("", span.trace_id.hex())}


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status == 200:
            assert self.path == "/v1/traces"
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(facts(group.resource))
                self.server.headers.append(dict(self.headers))
                for scope in group.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def facts(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(request_id: str = "ab" * 16, *, handover: bool = True, context: Any = None) -> Trace:
    """A request that was prefilled elsewhere: 10 ms in the queue, K/V after 40 ms more, 5 ms of hand-over, 5 ms to the
    first token, and 100 ms of decoding.
    """
    clock = Clock()
    trace = Trace(request_id, "ann", "@cf/a/b", clock, task="text-generation", context=context)
    trace.event("received", prompt_tokens=300, max_tokens=64)
    trace.event("queued", ahead_tokens=512)
    clock.now += 0.010
    trace.event("routed", why="kv", decode="d1", prefill="p1")
    clock.now += 0.050
    trace.event("first token", cached_tokens=256)
    clock.now += 0.100
    path = {"replica": "d1", "own": 256, "prefilled": 44, "computed": 0, "bytes": 9, "early_bytes": 4, "ttft_s": 0.050}
    path |= {"handover_s": 0.005, "handover_at_s": 0.040} if handover else {"handover_s": 0.0}
    trace.event("decoded", **path, drafted_tokens=12, accepted_tokens=9)
    trace.end("done", cached_tokens=256, completion_tokens=20)
    return trace


def milliseconds(span: Any, since: Any) -> tuple[float, float]:
    began, ended = span.start_time_unix_nano, span.end_time_unix_nano
    return tuple(round((at - since.start_time_unix_nano) / 1e6, 3) for at in (began, ended))


def test_a_request_becomes_the_spans_of_its_stages(receiver):
    exporting = tracing()
    exporting.ended(ended(context=read_traceparent(f"00-{TRACE}-{PARENT}-01", "vendor=1")))
    assert isinstance(exporting, Otlp) and exporting.flush()
    spans = receiver.named(TRACE)
    assert list(spans) == ["chat @cf/a/b", "queue", "prefill", "hand-over", "decode"]
    top = spans["chat @cf/a/b"]
    assert (top.parent_span_id.hex(), top.span_id.hex(), top.trace_state) == (PARENT, "ab" * 8, "vendor=1")
    assert {span.parent_span_id for name, span in spans.items() if span is not top} == {top.span_id}
    assert len({span.span_id for span in spans.values()}) == 5
    assert {name: milliseconds(span, top) for name, span in spans.items()} == {
        "chat @cf/a/b": (0, 160),
        "queue": (0, 10),
        "prefill": (10, 50),
        "hand-over": (50, 55),
        "decode": (60, 160),
    }
    told = facts(top)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "@cf/a/b")
    assert [told[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")] == [
        300,
        20,
        256,
    ]
    assert told["gen_ai.response.time_to_first_chunk"] == 0.06 and told["serve_app.request_id"] == "ab" * 16
    assert facts(spans["decode"])["serve_app.accepted_tokens"] == 9
    assert facts(spans["prefill"])["serve_app.prompt_tokens.prefilled"] == 44
    assert receiver.resources[0]["service.name"] == "serve-app"
    exporting.close()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, (1 << 40) + 3, (1 << 63) - 1, -1, 1.5])
def test_a_number_is_written_as_the_library_writes_it(value):
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from serve_app.gateway.tracing.spans import _number

    span = Span()
    told = span.attributes.add(key="gen_ai.usage.output_tokens")
    if isinstance(value, int):
        told.value.int_value = value
    else:
        told.value.double_value = value
    assert _number("gen_ai.usage.output_tokens", value) == span.SerializeToString()


def test_without_a_hand_over_prefill_lasts_until_the_first_token(receiver):
    exporting = tracing()
    exporting.ended(ended(handover=False))
    assert exporting.flush()
    spans = receiver.named("ab" * 16)
    assert list(spans) == ["chat @cf/a/b", "queue", "prefill", "decode"]
    assert milliseconds(spans["prefill"], spans["chat @cf/a/b"]) == (10, 60)
    exporting.close()


def test_the_standard_variables_are_followed(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    exporting = tracing()
    for number in range(256):
        # All ratios of the random half.
        exporting.ended(ended(f"{1:016x}{number:02x}{7:014x}"))
    assert exporting.flush()
    assert len({span.trace_id for span in receiver.spans}) == 64
    assert receiver.resources[0]["service.name"] == "mine" and receiver.headers[0]["x-team"] == "blue"
    # A client that samples, or not, decides for its own.
    unlucky = f"{1:032x}"[:16] + "ff" * 8
    for flag in ("00", "01"):
        exporting.ended(ended(context=read_traceparent(f"00-{unlucky}-{PARENT}-{flag}")))
    assert exporting.flush() and len(receiver.named(unlucky)) == 5
    exporting.close()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
    ],
)
def test_off(variables):
    found = tracing(variables)
    assert type(found) is Tracing and not found.sampled("ab" * 16, None)
    found.ended(ended())
    found.close()


def test_a_receiver_that_is_away_costs_spans_and_nothing_else(receiver, monkeypatch):
    """What waits is bounded, and the end does not wait for it."""
    receiver.status = 503
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setattr("serve_app.gateway.tracing.export.LAST_S", 0.1)
    exporting = tracing()
    for number in range(500):
        exporting.ended(ended(f"{number + 1:016x}" * 2))
    assert len(exporting._processor._batch_processor._queue) <= 64
    exporting.close()
    assert not receiver.spans


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0g",
    ],
)
def test_a_traceparent_that_is_none(header):
    assert read_traceparent(header) is None


def test_a_traceparent_of_a_later_version_is_read():
    found = read_traceparent(f"01-{TRACE}-{PARENT}-03-more")
    assert found is not None and (found.trace_id, found.sampled) == (TRACE, True)


async def test_over_http_from_the_client_to_the_receiver(serve, record, receiver):  # noqa: F811
    """The client's trace is taken over and given back, and every request has spans, however it ends."""
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.gateway.backends[model] = EchoBackend()
        ask = served.http.post
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
        path = f"{ACCOUNT}/run/{model}"
        answer = await ask(path, json={"prompt": "one two three"}, headers=headers)
        own = answer.headers["cf-ray"]
        assert answer.headers["traceresponse"] == f"00-{TRACE}-{own[:16]}-01"
        plain = await ask(path, json={"prompt": "four"})
        assert "traceresponse" not in plain.headers
        busy = await ask(path, json={"prompt": "busy"})
        broken = await ask(path, json={"prompt": "break"})
        assert (busy.status_code, broken.status_code) == (429, 500)
        assert served.gateway.tracing.flush()
        [span] = receiver.named(TRACE).values()
        assert (span.name, span.parent_span_id.hex(), span.span_id.hex()) == (f"chat {model}", PARENT, own[:16])
        assert facts(span)["gen_ai.usage.output_tokens"] == 3
        for found, status in ((plain, "done"), (busy, "refused"), (broken, "failed")):
            [span] = receiver.named(found.headers["cf-ray"]).values()
            assert facts(span)["serve_app.status"] == status
            assert (span.status.code == 2) == (status == "failed")
        told = (await served.gateway.state.traces.get("local", own))["trace_id"]
        assert told == TRACE
        served.gateway.tracing.close()


async def test_without_an_exporter_the_trace_is_still_given_back(serve):  # noqa: F811
    async with serve() as served:
        answer = await served.http.get("/ping", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert answer.headers["traceresponse"] == f"00-{TRACE}-{answer.headers['cf-ray'][:16]}-00"


@pytest.mark.parametrize("name", ["always_on", "always_off", "traceidratio", "nonsense", None])
@pytest.mark.parametrize("ratio", ["0.1", "0", "1", "2", "x", None])
def test_the_sampler_is_the_sdks(name, ratio, monkeypatch):
    """For every trace, with a parent and without, whatever the variables say."""
    import random

    from opentelemetry import trace as otel
    from opentelemetry.sdk.trace.sampling import Decision, _get_from_env_or_default

    from serve_app.gateway.tracing.sampling import sampler

    chosen = random.Random(7)
    for prefix in ("", "parentbased_"):
        told = {"OTEL_TRACES_SAMPLER": name and prefix + name, "OTEL_TRACES_SAMPLER_ARG": ratio}
        for variable, value in told.items():
            monkeypatch.delenv(variable, raising=False)
            if value is not None:
                monkeypatch.setenv(variable, value)
        ours, theirs = sampler({k: v for k, v in told.items() if v is not None}), _get_from_env_or_default()
        for _ in range(100):
            trace_id = f"{chosen.getrandbits(128):032x}"
            for header in ("", f"00-{trace_id}-{PARENT}-00", f"00-{trace_id}-{PARENT}-01"):
                known = read_traceparent(header) if header else None
                context = None
                if known is not None:
                    parent = otel.SpanContext(int(trace_id, 16), int(PARENT, 16), True, otel.TraceFlags(known.sampled))
                    context = otel.set_span_in_context(otel.NonRecordingSpan(parent))
                wanted = theirs.should_sample(context, int(trace_id, 16), "x").decision is Decision.RECORD_AND_SAMPLE
                assert ours(trace_id, known) is wanted, (told, header)


async def test_what_is_refused_before_anything_begins_has_one_span(serve, record, receiver):  # noqa: F811
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.gateway.backends[model] = EchoBackend()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        path = f"{ACCOUNT}/run/{model}"
        bad = await served.http.post(path, json={"prompt": 5}, headers=headers)
        nowhere = await served.http.get("/nothing/here")
        stranger = await served.http.post(path, json={"prompt": "x"}, headers={"Authorization": "Bearer wrong"})
        assert (bad.status_code, nowhere.status_code, stranger.status_code) == (400, 404, 401)
        assert served.gateway.tracing.flush()
        [span] = receiver.named(TRACE).values()
        assert (span.name, span.parent_span_id.hex(), span.span_id.hex()) == (
            "POST", PARENT, bad.headers["cf-ray"][:16],
        )  # fmt: skip
        told = facts(span)
        assert (told["http.response.status_code"], told["url.path"], told["serve_app.status"]) == (400, path, "refused")
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        for found, status in ((nowhere, 404), (stranger, 401)):
            [span] = receiver.named(found.headers["cf-ray"]).values()
            assert facts(span)["error.type"] == str(status)
        # One that has begun has the spans of its work alone.
        busy = await served.http.post(path, json={"prompt": "busy"})
        assert served.gateway.tracing.flush()
        assert list(receiver.named(busy.headers["cf-ray"])) == [f"chat {model}"]
        served.gateway.tracing.close()
