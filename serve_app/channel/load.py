"""What a worker says of its own load: a few dozen bytes, and measured steps for whoever predicts from them.

Numbers that travel through Serve's controller are seconds old; these are as old as one engine step.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import Any

from serve_app.channel.frames import BadFrame
from serve_app.channel.served import MAX_SERVED

MAX_NAME = 200
# Samples per report; what does not fit is not missed.
MAX_SAMPLES = 16


@dataclass(slots=True, frozen=True)
class LoadReport:
    """One worker's load. ``replica`` is Serve's id of the replica it belongs to, ``role`` what it prefers to do, as
    gateway ``planner`` wishes, one of ``gateways`` that it reports to ("": nobody has a wish).

    ``queued_tokens``: prompt tokens accepted, not computed yet and not stored anywhere. ``running`` requests are in the
    batch, ``waiting`` ones are not yet. ``step_seconds``: recent mean time of a step. ``steps``, ``fetches``: samples
    since the last report, as fields of ``StepSample`` and ``FetchSample`` of :mod:`serve_app.routing.types`.
    ``served``: what tenants have lately got by way of each gateway, as :mod:`serve_app.channel.served` lists it.
    """

    replica: str
    model: str
    stage: str
    role: str
    node: str
    planner: str = ""
    gateways: int = 1
    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    max_seqs: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    block_tokens: int = 0
    max_batch_tokens: int = 0
    step_seconds: float = 0.0
    draining: bool = False
    steps: tuple[tuple[int, int, int, int, float], ...] = ()
    fetches: tuple[tuple[str, int, float], ...] = ()
    served: tuple[tuple[int, str, str, str, int, int, int], ...] = ()

    @property
    def busy(self) -> bool:
        return bool(self.queued_tokens or self.running or self.waiting)

    def to_wire(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_wire(cls, wire: Any) -> LoadReport:
        """Raises :class:`BadFrame` for anything but what :meth:`to_wire` makes."""
        if not isinstance(wire, list) or len(wire) != len(fields(cls)):
            raise BadFrame(f"a load report has {len(fields(cls))} fields")
        *plain, steps, fetches, served = wire
        for value, field in zip(plain, fields(cls), strict=False):
            _check(field.name, str(field.type), value)
        plain += [_samples("iiiif", steps), _samples("sif", fetches), _samples("isssiii", served, MAX_SERVED)]
        return cls(*plain)


_KINDS = {"s": "str", "i": "int", "f": "float"}


def _samples(form: str, wire: Any, most: int = MAX_SAMPLES) -> Any:
    if not isinstance(wire, list | tuple) or len(wire) > most:
        raise BadFrame(f"a load report has at most {most} samples of this kind")
    for sample in wire:
        if not isinstance(sample, list | tuple) or len(sample) != len(form):
            raise BadFrame(f"a sample has {len(form)} fields")
        for kind, value in zip(form, sample, strict=True):
            _check("a sample", _KINDS[kind], value)
    return tuple(tuple(sample) for sample in wire)


def _check(name: str, kind: str, value: Any) -> None:
    if kind == "str":
        good = type(value) is str and len(value) <= MAX_NAME
    elif kind == "int":
        good = type(value) is int and 0 <= value < 1 << 53
    elif kind == "bool":
        good = type(value) is bool
    else:
        good = type(value) in (int, float) and math.isfinite(value) and value >= 0
    if not good:
        raise BadFrame(f"{name} of a load report can't be {str(value)[:40]!r}")
