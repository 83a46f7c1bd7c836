"""Which requests are sampled, by ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``.

The rules are those of OpenTelemetry's SDK, for spans whose parent is of another process or that have none. Asked of
every request, they cost what one comparison costs; the SDK's own make half a dozen objects for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from serve_app.api.trace_context import TraceContext

log = logging.getLogger("ray.serve")

# Of a trace's id the lower 64 bits count; all of them below the bound are sampled.
_BITS = 64
_USUAL = "parentbased_always_on"
_NAMES = ("always_on", "always_off", "traceidratio")
# Of a trace's id, 32 hex digits, and of the client's trace.
Sampler = Callable[[str, TraceContext | None], bool]


def sampler(environ: Mapping[str, str]) -> Sampler:
    """As the environment says; like the SDK it warns of what it does not know, and then samples."""
    name = environ.get("OTEL_TRACES_SAMPLER", _USUAL).lower()
    root = name.removeprefix("parentbased_")
    if root not in _NAMES:
        log.warning("OTEL_TRACES_SAMPLER=%s is not known here: %s holds", name, _USUAL)
        name, root = _USUAL, "always_on"
    bound = round(_share(environ, root) * (1 << _BITS))
    parents = name != root

    def sampled(trace_id: str, known: TraceContext | None) -> bool:
        if parents and known is not None:
            return known.sampled
        return int(trace_id[-16:], 16) < bound

    return sampled


def _share(environ: Mapping[str, str], root: str) -> float:
    if root != "traceidratio":
        return float(root == "always_on")
    told = environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    try:
        share = float(told)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        log.warning("OTEL_TRACES_SAMPLER_ARG=%s is no number from 0 to 1: everything is sampled", told)
        return 1.0
    return share
