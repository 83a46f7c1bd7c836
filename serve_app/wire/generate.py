"""Calls that have text generated: gateway -> decode replica -> its worker, and decode replica -> prefill replica."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from serve_app.sampling_params import PromptLogprobs, SamplingParams
from serve_app.wire.address import InboxAddress
from serve_app.wire.message import Message, MessageDecoder
from serve_app.wire.tokens import TokenItem

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


class PrefillAt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who computes a prompt: a stage and, as a wish, one of its replicas; ``stage`` "": whoever generates."""

    stage: str
    replica: str = ""


HERE = PrefillAt("")


class AdapterAt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A LoRA adapter in the file store: ``adapters/{digest}/adapter_config.json`` and ``adapter_model.safetensors``
    beside it. ``digest``: of the content of both, hexadecimal; ``size``: bytes of both.
    """

    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class MediaAt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A picture or sound of a prompt. ``data``: the file as it came; ``digest``: of that; ``places``: (first token,
    count) of each run of placeholders that its features stand for, in order. ``grid``: rows and columns of these, where
    the positions of all that follows depend on it.
    """

    medium: Literal["image", "audio"]
    data: bytes
    digest: bytes
    places: tuple[tuple[int, int], ...]
    grid: tuple[int, int] | None = None


class GenerateCall(Message, tag="generate:12", frozen=True):
    """One request from prompt to last token. Answered by :data:`GenerateResult`.

    ``ids``: little-endian int32; the prompt, then ``resumed`` tokens that a lost worker has generated. ``inbox``: where
    tokens go as they come; None: nowhere. ``prefill``: who computes what is stored nowhere; None: whom the replica
    would choose. ``prefill_above``, from the replica to its worker: a prompt that lacks so many tokens is not started
    but answered with :class:`Missing`. ``share``: of the worker's time, the least that batch requests get. ``adapter``:
    what its tokens pass through beside the model; None: the model alone. ``weight``: the account's, whose part of the
    worker's places grows with it. ``together``: so many tokens behind the first are sent together, for who reads them
    at the end. ``origin``: ids of the client's request and its trace, for logs. ``media``: in the order of their
    places.
    """

    id: str
    ids: bytes
    salt: bytes
    sampling: SamplingParams
    inbox: InboxAddress | None = None
    priority: Literal["realtime", "batch"] = "realtime"
    resumed: int = 0
    prefill: PrefillAt | None = None
    prefill_above: int | None = None
    share: Share = 0.05
    adapter: AdapterAt | None = None
    weight: Weight = 1.0
    together: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    origin: tuple[str, str] = ("", "")
    media: tuple[MediaAt, ...] = ()


class Missing(Message, tag="missing:1", frozen=True):
    """Not started: ``tokens`` of the prompt are neither in the engine nor in the pool, ``cached`` are. The request
    stays registered for :data:`~serve_app.worker.requests.WAIT_S` and is started by :class:`ArrivingCall`.
    """

    tokens: int
    cached: int


class ArrivingCall(Message, tag="arriving:1", frozen=True):
    """Request ``id`` was answered with :class:`Missing` and is being prefilled elsewhere: takes over what is computed
    there, until :class:`Prefilled` says that it has ended, and goes on. Answered like :class:`GenerateCall`.
    """

    id: str


class PromptPath(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the tokens of a prompt came from, each counted once: found in the worker's ``own`` blocks, its ``node``'s
    pool, that pool's files (``disk``) or a ``remote`` pool (together what the client sees as cached), ``prefilled``
    for this request by another worker, or ``computed`` where it was generated.

    ``bytes`` were moved, ``early_bytes`` of them while prefill was still computing; ``handover_s`` passed between the
    end of prefill and the start of decode, ``handover_share`` of the time to first token ``ttft_s``. It began
    ``handover_at_s`` after the worker had the request. Of ``drafted_tokens``, ``accepted_tokens`` were.
    """

    own: int = 0
    node: int = 0
    disk: int = 0
    remote: int = 0
    prefilled: int = 0
    computed: int = 0
    bytes: int = 0
    early_bytes: int = 0
    handover_s: float = 0.0
    handover_share: float | None = None
    ttft_s: float | None = None
    handover_at_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        """As a request's trace shows it."""
        return msgspec.structs.asdict(self)


class Generated(Message, tag="generated:4", frozen=True):
    """How a request ended. ``cached``: prompt tokens found stored. ``undelivered``: what the gateway had not
    acknowledged, so that a complete answer never depends on the channel. ``replica``: where it was generated.
    ``prompt_logprobs``: where the sampling asked for them.
    """

    finish: str
    cached: int
    path: PromptPath
    undelivered: tuple[TokenItem, ...] = ()
    replica: str = ""
    prompt_logprobs: PromptLogprobs | None = None


class Failed(Message, tag="failed:1", frozen=True):
    """``refused``: no worker will ever take this request; otherwise another may."""

    error: str
    refused: bool = False


class GenerateMany(Message, tag="generate-many:1", frozen=True):
    """Requests that go to one worker together and ask for no prefill elsewhere: one call costs more than what is in it.
    Answered by :class:`GeneratedMany` once all have ended; how each has ended is told before, over
    the channel (:class:`serve_app.wire.tokens.Ended`).
    """

    calls: tuple[GenerateCall, ...]


class GeneratedMany(Message, tag="generated-many:1", frozen=True):
    """How the requests of a :class:`GenerateMany` have ended, in its order."""

    results: tuple[Generated | Failed, ...]


class PrefillCall(Message, tag="prefill:8", frozen=True):
    """Computes and publishes the K/V of all ``ids`` (little-endian int32). Answered by :data:`PrefillResult`.

    ``priority``, ``share``, ``adapter``, ``weight``, ``origin`` and ``media`` as in :class:`GenerateCall`.
    """

    id: str
    ids: bytes
    salt: bytes
    priority: Literal["realtime", "batch"] = "realtime"
    share: Share = 0.05
    adapter: AdapterAt | None = None
    weight: Weight = 1.0
    origin: tuple[str, str] = ("", "")
    media: tuple[MediaAt, ...] = ()


class PrefillDone(Message, tag="prefill-done:1", frozen=True):
    """The pool of ``node`` holds the K/V; ``cached`` tokens had not to be computed."""

    cached: int
    node: str


class Prefilled(Message, tag="prefilled:1", frozen=True):
    """Tells the worker that waits for prefill how it ended: ``node`` None if it failed."""

    id: str
    cached: int = 0
    node: str | None = None


class CollectCall(Message, tag="collect:1", frozen=True):
    """From a gateway that the channel does not reach: the tokens of request ``id`` from ``offset`` on. Answered by
    :class:`Collected`.
    """

    id: str
    offset: int


class Collected(Message, tag="collected:1", frozen=True):
    items: tuple[TokenItem, ...] = ()


GenerateResult = Generated | Missing | Failed
PrefillResult = PrefillDone | Failed
read_generate_call: MessageDecoder[GenerateCall] = MessageDecoder(GenerateCall)
read_generate_result: MessageDecoder[GenerateResult] = MessageDecoder(GenerateResult)
read_generate_many: MessageDecoder[GenerateMany] = MessageDecoder(GenerateMany)
read_generated_many: MessageDecoder[GeneratedMany] = MessageDecoder(GeneratedMany)
read_ending: MessageDecoder[Generated | Failed] = MessageDecoder(Generated | Failed)
read_arriving_call: MessageDecoder[ArrivingCall] = MessageDecoder(ArrivingCall)
read_prefill_call: MessageDecoder[PrefillCall] = MessageDecoder(PrefillCall)
read_prefill_result: MessageDecoder[PrefillResult] = MessageDecoder(PrefillResult)
read_prefilled: MessageDecoder[Prefilled] = MessageDecoder(Prefilled)
read_collect_call: MessageDecoder[CollectCall] = MessageDecoder(CollectCall)
read_collected: MessageDecoder[Collected] = MessageDecoder(Collected)
