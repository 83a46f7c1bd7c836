"""The calls that a gateway makes to a model's replicas: the method's name, what it takes and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from serve_app.wire import decide, encode, generate, predict, replicas
from serve_app.wire.message import Message, MessageDecoder

C = TypeVar("C", bound=Message)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Method(Generic[C, R]):
    """``name`` is a method of a deployment that takes and returns encoded messages."""

    name: str
    call: type[C]
    result: MessageDecoder[R]


# A replica's to have; all replicas of a stage are asked for the others.
GENERATE = Method("generate", generate.GenerateCall, generate.read_generate_result)
GENERATE_MANY = Method("generate_many", generate.GenerateMany, generate.read_generated_many)
DECIDE = Method("decide", decide.DecideCall, decide.read_decide_result)
ENCODE = Method("encode", encode.EncodeCall, encode.read_encode_result)
PREDICT = Method("predict", predict.PredictCall, predict.read_predict_result)
PROBE = Method("probe", replicas.Nothing, replicas.read_nothing)
WAKE = Method("wake", replicas.Nothing, replicas.read_nothing)

COLLECT = Method("collect", generate.CollectCall, generate.read_collected)
SUBSCRIBE = Method("subscribe", replicas.Subscribe, replicas.read_subscribed)
PROGRESS = Method("progress", predict.ProgressCall, predict.read_progress_told)
ALL_STATS = Method("all_stats", replicas.Nothing, replicas.read_all_counters)
