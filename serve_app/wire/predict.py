"""Calls of tasks that answer each input by itself: gateway -> replica -> its worker."""

from __future__ import annotations

from typing import Literal

from serve_app.wire.generate import Failed
from serve_app.wire.message import Message, MessageDecoder


class PredictCall(Message, tag="predict:2", frozen=True):
    """``inputs``: what the task's worker reads, a file or token ids, one by one; ``options``: JSON of the task's own;
    ``salt``: of its tenant, whose inputs are prepared in turn with others'. Answered by :data:`PredictResult`.
    """

    inputs: tuple[bytes, ...]
    options: bytes = b"{}"
    priority: Literal["realtime", "batch"] = "realtime"
    salt: bytes = b""


class Predicted(Message, tag="predicted:1", frozen=True):
    """``results``: JSON of the task's own, one for each input. ``units``: what was used, by the names of
    `catalog.pricing.UNITS`.
    """

    results: tuple[bytes, ...]
    units: dict[str, int] = {}


class ProgressCall(Message, tag="progress:1", frozen=True):
    """How far an input has come whose ``watch`` the gateway has chosen."""

    watch: str


class ProgressTold(Message, tag="progress-told:1", frozen=True):
    """``done`` of ``steps``; 0 of 0 where nothing of that name is being computed."""

    done: int = 0
    steps: int = 0


PredictResult = Predicted | Failed
read_predict_call: MessageDecoder[PredictCall] = MessageDecoder(PredictCall)
read_predict_result: MessageDecoder[PredictResult] = MessageDecoder(PredictResult)
read_progress_call: MessageDecoder[ProgressCall] = MessageDecoder(ProgressCall)
read_progress_told: MessageDecoder[ProgressTold] = MessageDecoder(ProgressTold)
