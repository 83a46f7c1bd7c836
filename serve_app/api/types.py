"""One request and one stream of events, whatever the dialect. Dialects translate to and from these; the
gateway works on these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from serve_app.api.fields.content import TEXT_ONLY, PartKind
from serve_app.api.multi_vector import WEIGHTS, ScoreMode
from serve_app.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True)
class ModelLimits:
    """What a model's record says about the values a request may carry.

    ``default_max_tokens`` (``default_chat_tokens`` in OpenAI's chat completions and responses) and the sampling
    fields apply when the client gives none; ``context_window`` counts
    prompt and output tokens; ``vocab_size`` bounds token ids; ``None`` means "not known here", and leaves the
    check to whoever knows.
    """

    default_max_tokens: int = 256
    default_chat_tokens: int = 4096
    context_window: int | None = None
    vocab_size: int | None = None
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None  # None: the model's own
    # Kinds of content parts that messages may hold.
    takes: frozenset[PartKind] = TEXT_ONLY
    # Whether requests may name an adapter.
    lora: bool = False

    @property
    def of_chat(self) -> ModelLimits:
        """The same for OpenAI's chat completions and responses."""
        return replace(self, default_max_tokens=self.default_chat_tokens)


@dataclass(slots=True, kw_only=True)
class TaskRequest:
    """How a request asks to be treated; every task has it.

    ``session`` is an opaque name that requests with the same beginning share: a hint of where to run. ``deadline_s``:
    seconds from arrival in which the answer must have begun. ``reject_if_busy``: refuse at once rather than wait.
    ``resumable_s``: seconds for which a stream goes on without a client, and is kept after its end. ``estimate``: tell
    what the request would cost, and do not run it.
    ``service_tier`` and ``metadata`` are what the client wrote. ``answers``: media types of which the client may choose
    one by ``accept``, its header; of requests that have one form of answer that is not looked at.
    """

    answers: ClassVar[tuple[str, ...]] = ()

    session: str | None = None
    reject_if_busy: bool = False
    deadline_s: float | None = None
    resumable_s: float | None = None
    estimate: bool = False
    accept: str = ""
    service_tier: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(slots=True, frozen=True)
class AnswerFormat:
    """What the answer must look like. ``value``: a schema, an expression, choices or a grammar; ``field`` asked for
    it."""

    kind: FormatKind
    value: Any = None
    field: str = "response_format"

    @property
    def is_json(self) -> bool:
        return self.kind in ("json_object", "json_schema")


@dataclass(slots=True, frozen=True)
class AdapterRef:
    """An adapter as a request uses it. ``id``: the adapter's; ``digest``: of its content, by which workers and caches
    know it; ``size``: bytes of its files.
    """

    id: str
    digest: str
    size: int


@dataclass(slots=True)
class GenerateRequest(TaskRequest):
    """Text generation. Exactly one of ``messages``, ``prompt`` and ``prompt_ids`` is set.

    ``messages`` are OpenAI-shaped: ``{"role", "content", "tool_calls"?, "tool_call_id"?, "name"?}``, with None, a
    string or a list of parts (`fields.content`) as content. ``raw`` sends ``prompt`` past the chat template.
    ``tools`` are ``{"type": "function", "function": {...}}``; ``tool_choice`` is "auto", "none", "required", or the
    object that names one or some tools; ``strict_tools`` name those whose arguments must validate even where calls are
    up to the model.
    ``max_tokens_given`` tells a limit the client asked for from the model's
    default, which may be shortened to fit. ``lora``: the id or name of an adapter, "" for none; ``adapter``: what that
    is, once it has been looked up.
    """

    model: str
    messages: list[dict[str, Any]] | None
    prompt: str | None
    raw: bool
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    # Which of several prompts of one body this is.
    number: int = 0
    include_usage: bool = True
    # Whether each chunk of a stream tells the usage so far.
    continuous_usage: bool = False
    # The last tokens of the prompt that stay, or the first; -1: as many as fit the context window. None: all, or it is
    # refused.
    keep_tokens: int | None = None
    keep_first: bool = False
    # Whether the oldest messages go where the conversation is too long for the context window.
    drop_oldest: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    echo: bool = False
    prompt_ids: tuple[int, ...] | None = None
    max_tokens_given: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    strict_tools: tuple[str, ...] = ()
    answer_format: AnswerFormat | None = None
    # Whether the client expects to see the reasoning of models that have one.
    show_reasoning: bool = True
    # Whether token ids of prompt and answer are told; and whether the prompt is all there is: nothing is generated.
    return_token_ids: bool = False
    prompt_only: bool = False
    # How many alternatives to each token of the prompt are told, in a field of their own.
    prompt_logprobs: int | None = None
    lora: str = ""
    adapter: AdapterRef | None = None

    @property
    def tells_prompt(self) -> bool:
        """Whether :class:`PromptTokens` is among the events."""
        return self.echo or self.return_token_ids or self.sampling.prompt_logprobs is not None


Side = Literal["end", "start"]


@dataclass(slots=True, frozen=True)
class Shorten:
    """Where a text with too many tokens is cut; one without this is refused.

    ``tokens``: how many stay at most, those that the tokenizer adds included; None: what the model takes. Of a pair
    the second text is cut first, and to ``second`` tokens in any case.
    """

    tokens: int | None = None
    second: int | None = None
    side: Side = "end"


TokenHead = Literal["sparse", "colbert"]
EmbedForm = Literal["text", "contexts", "scores"]


@dataclass(slots=True)
class EmbedRequest(TaskRequest):
    """``form`` says how to answer: vectors of texts, vectors of contexts, or scores of ``texts[1:]`` against
    ``texts[0]``, by ``score_mode``. ``heads``: what is wanted of each token besides, where the model has it. ``ids``
    stand in place of ``texts`` where the client has tokenised: the model's own, as they are."""

    model: str
    texts: list[str]
    pooling: Literal["mean", "cls"] | None = None
    encoding: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    form: EmbedForm = "text"
    heads: tuple[TokenHead, ...] = ()
    return_dense: bool = True
    score_mode: ScoreMode = "dense"
    score_weights: tuple[float, ...] = WEIGHTS
    ids: list[tuple[int, ...]] | None = None
    shorten: Shorten | None = None
    # What the texts are, for models that write something before them, and what to write instead.
    role: Literal["query", "document"] | None = None
    instruction: str = ""


@dataclass(slots=True)
class RerankRequest(TaskRequest):
    """``contexts`` against ``query``, or each against the one of ``queries`` in its place. ``raw``: logits instead of
    scores within (0, 1)."""

    model: str
    query: str
    contexts: list[str]
    top_k: int | None = None
    queries: list[str] | None = None
    shorten: Shorten | None = None
    raw: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        queries = self.queries if self.queries is not None else [self.query] * len(self.contexts)
        return list(zip(queries, self.contexts, strict=True))


@dataclass(slots=True)
class TokenLogprob:
    """Natural-log probability of one token of an answer or a prompt; ``top`` holds (token, token id, logprob) of the
    likeliest ones. ``rank`` among all tokens, from 1, is told of a prompt's."""

    token: str
    token_id: int
    logprob: float
    top: list[tuple[str, int, float]] = field(default_factory=list)
    rank: int = 0


@dataclass(slots=True)
class PromptTokens:
    """The prompt of choice ``index``. ``logprobs``, where asked for, are one per token; the first has none."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...] = ()
    logprobs: list[TokenLogprob | None] | None = None


@dataclass(slots=True)
class TextDelta:
    """More text of choice ``index``. ``token_ids`` are the tokens whose text ended in or before this
    delta."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class ReasoningDelta:
    """More of what the model says to itself before choice ``index`` answers."""

    index: int
    text: str


@dataclass(slots=True)
class ToolCallDelta:
    """Part of a tool call of choice ``index``. The first part has the ``name``; ``arguments`` of all parts join to the
    JSON text of an object, unless the model broke it off or broke it; ``last`` ends the call."""

    index: int
    call_index: int
    id: str
    name: str
    arguments: str
    last: bool = True


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ChoiceDone:
    """The end of choice ``index``; ``stop`` is the stop string that ended it, or ``None``. ``token_ids``: all that were
    generated, where the request asks for them."""

    index: int
    finish_reason: FinishReason
    stop: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Usage:
    """Tokens of one request over all its choices. ``cached_tokens`` are those prompt tokens that were not
    computed again. One that is not ``final`` counts up to the event behind it, and has no price yet.

    ``micro_neurons`` and ``nano_cost`` (1e-9 of ``currency``; None: the model has no price in money) are those of the
    ledger's entries.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion tokens
    final: bool = True
    micro_neurons: int = 0
    nano_cost: int | None = None
    currency: str = ""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


# A request's events: the prompt where it is asked for, any number of the next four, one final Usage, and the end.
Event = PromptTokens | TextDelta | ReasoningDelta | ToolCallDelta | ChoiceDone | Usage
