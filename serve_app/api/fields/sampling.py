"""The sampling fields, shared by the dialects: names, ranges and defaults as in the Workers AI schemas, a
little wider."""

from __future__ import annotations

from typing import Any

from serve_app.api import identity
from serve_app.api.errors import InvalidInput
from serve_app.api.fields import ranges
from serve_app.api.fields.body import json_type
from serve_app.api.fields.values import boolean, refuse, text
from serve_app.api.types import ModelLimits
from serve_app.sampling_params import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MIN_TOP_P = 0.001


def parse_sampling(
    body: dict[str, Any], limits: ModelLimits, *, logprobs: int | None = None
) -> tuple[SamplingParams, bool]:
    """The sampling parameters of a body, and whether the client set a limit of tokens itself.

    ``logprobs`` was read by the dialect, whose ways of asking differ. A random seed is drawn where none is
    given. Raises `InvalidInput` with the field and its range.
    """
    max_tokens = ranges.TOKENS.read(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = ranges.TOKENS.read(body, "max_tokens")
    top_p = ranges.TOP_P.read(body, "top_p")
    seed = ranges.SEED.read(body, "seed")
    repetition = ranges.REPETITION_PENALTY.read(body, "repetition_penalty")
    least = ranges.LEAST_TOKENS.read(body, "min_tokens") or 0
    most = max_tokens or limits.default_max_tokens
    if least > most:
        raise InvalidInput(f"min_tokens is {least}, more than max_tokens, which is {most}.", param="min_tokens")
    params = SamplingParams(
        max_tokens=most,
        min_tokens=least,
        temperature=_or(ranges.TEMPERATURE.read(body, "temperature"), limits.temperature),
        top_k=_or(ranges.TOP_K.read(body, "top_k"), limits.top_k),
        # Older schemas allow 0 to 2; outside (0, 1] a nucleus has no meaning, so the ends stand for the
        # nearest one.
        top_p=limits.top_p if top_p is None else min(max(top_p, MIN_TOP_P), 1.0),
        min_p=_or(ranges.MIN_P.read(body, "min_p"), limits.min_p),
        seed=identity.seed() if seed is None else seed,
        # The schemas allow 0, by which nothing can be divided: it means "off", like 1.
        repetition_penalty=limits.repetition_penalty if repetition is None else repetition or 1.0,
        frequency_penalty=_or(ranges.PENALTY.read(body, "frequency_penalty"), 0.0),
        presence_penalty=_or(ranges.PENALTY.read(body, "presence_penalty"), 0.0),
        logit_bias=parse_logit_bias(body.get("logit_bias"), limits.vocab_size),
        logprobs=logprobs,
        stop_token_ids=parse_token_ids(
            body.get("stop_token_ids"), "stop_token_ids", limits.vocab_size, limit=MAX_STOPS
        ),
        ignore_eos=bool(boolean(body, "ignore_eos")),
    )
    return params, max_tokens is not None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def parse_n(body: dict[str, Any]) -> int:
    n = ranges.CHOICES.read(body, "n") or 1
    best_of = ranges.CHOICES.read(body, "best_of")
    if best_of is not None and best_of != n:
        raise InvalidInput("best_of is not supported; use n and choose among the choices.", param="best_of")
    return n


def parse_stop(value: Any) -> tuple[str, ...]:
    """A stop string or an array of them; null and an empty array mean none."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise refuse("stop", "a string or an array of strings", value)
    if len(items) > MAX_STOPS:
        raise InvalidInput(f"stop must have at most {MAX_STOPS} strings, got {len(items)}.", param="stop")
    stops = [text(item, "stop", limit=MAX_STOP_CHARS) for item in items]
    if not all(stops):
        raise InvalidInput("stop must not hold an empty string, which would end every answer at once.", param="stop")
    return tuple(dict.fromkeys(stops))


def parse_logit_bias(value: Any, vocab_size: int | None) -> dict[int, float] | None:
    """``{"<token id>": bias}`` with biases from -100 to 100, as in the OpenAI API."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise refuse("logit_bias", "an object of token ids to numbers", value)
    if len(value) > MAX_BIASES:
        raise InvalidInput(f"logit_bias must have at most {MAX_BIASES} entries, got {len(value)}.", param="logit_bias")
    biases: dict[int, float] = {}
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidInput('The keys of logit_bias must be token ids such as "42".', param="logit_bias")
        bias = ranges.BIAS.read(value, key)
        if bias is None:
            raise InvalidInput(f"The bias of token {key} must be a number between -100 and 100.", param="logit_bias")
        biases[_in_vocab(int(key), "logit_bias", vocab_size)] = bias
    return biases


def parse_token_ids(value: Any, name: str, vocab_size: int | None, *, limit: int | None = None) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise refuse(name, "an array of token ids", value)
    if limit is not None and len(value) > limit:
        raise InvalidInput(f"{name} must have at most {limit} items, got {len(value)}.", param=name)
    top = int(ranges.TOKENS.high) if vocab_size is None else vocab_size
    # Long prompts come so.
    if value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < top:
        return tuple(value)
    ids = []
    for item in value:
        # As in JSON Schema 5.0 is an integer.
        whole = int(item) if isinstance(item, float) and item.is_integer() else item
        if isinstance(whole, bool) or not isinstance(whole, int):
            raise InvalidInput(f"{name} must hold token ids (integers), not {json_type(item)}.", param=name)
        ids.append(_in_vocab(whole, name, vocab_size))
    return tuple(ids)


def _in_vocab(token_id: int, name: str, vocab_size: int | None) -> int:
    top = int(ranges.TOKENS.high) if vocab_size is None else vocab_size
    if not 0 <= token_id < top:
        message = (
            f"{name}: {str(token_id)[:24]} is out of vocabulary; token ids go from 0 to {top - 1}, of {top} in all."
        )
        raise InvalidInput(message, param=name)
    return token_id


def parse_chat_logprobs(body: dict[str, Any]) -> int | None:
    """``logprobs: true`` with ``top_logprobs`` (chat form): the number of alternatives per token, or ``None``
    for off."""
    wanted = boolean(body, "logprobs")
    top = ranges.TOP_LOGPROBS.read(body, "top_logprobs")
    if top and not wanted:
        raise InvalidInput("top_logprobs needs logprobs set to true.", param="top_logprobs")
    return (top or 0) if wanted else None


# Fields that change what the answer must look like and that we cannot honour yet: refused, never ignored.
_UNSUPPORTED = {
    "functions": "the legacy field functions; send tools instead, it",
    "function_call": "the legacy field function_call; send tool_choice instead, it",
    "image": "image input",
    "audio": "audio",
    "prompt_embeds": "embeddings as a prompt",
    "prompt_logprobs": "log-probabilities of the prompt",
    "guided_whitespace_pattern": "white space of one's own in JSON",
    "bad_words": "forbidding words; send logit_bias instead, it",
    "allowed_token_ids": "a list of allowed tokens",
    "use_beam_search": "beam search",
    "logprob_token_ids": "log-probabilities of tokens of one's choice",
    "return_tokens_as_token_ids": "tokens by their ids in log-probabilities; send return_token_ids instead, it",
    "thinking_token_budget": "a budget of thinking tokens",
    "logits_processors": "a logits processor from the client",
    "include_stop_str_in_output": "a stop string in the answer",
    "suffix": "insertion before a suffix",
    "chat_template": "a chat template from the client",
    "prediction": "predicted output",
    "web_search_options": "web search",
}


def refuse_unsupported(body: dict[str, Any], *, but: frozenset[str] = frozenset()) -> None:
    """Raises `InvalidInput` for a known field that this server does not honour; null, false and empty values
    ask nothing. ``but``: fields that the dialect does honour."""
    for name, what in _UNSUPPORTED.items():
        # 0 equals False, and is a value.
        asks = body.get(name) not in (None, False, "", [], {}) or type(body.get(name)) in (int, float)
        if name not in but and asks:
            raise InvalidInput(f"{name}: {what} is not supported yet; leave the field out.", param=name)
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise InvalidInput('modalities: only ["text"] is supported.', param="modalities")
