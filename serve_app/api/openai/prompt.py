"""What OpenAI's dialect tells of a prompt: in front of the answer's log-probabilities, or as vLLM has them."""

from __future__ import annotations

from typing import Any

from serve_app.api.collect import Choice
from serve_app.api.types import GenerateRequest, PromptTokens


def echoed(request: GenerateRequest, choice: Choice) -> str:
    """The prompt before the answer, where the request asks for it."""
    if not request.echo:
        return ""
    return choice.prompt.text if choice.prompt is not None else request.prompt or ""


def prompt_part(prompt: PromptTokens, top: int) -> dict[str, Any]:
    """The legacy arrays for the tokens of a prompt; the first, which nothing precedes, has no log-probability."""
    offsets, offset = [], 0
    for index, token in enumerate(prompt.tokens):
        offsets.append(offset)
        # What the tokenizer puts in front is no part of the text.
        offset += len(token) if index or prompt.text.startswith(token) else 0
    told = prompt.logprobs or []
    return {
        "tokens": list(prompt.tokens),
        "token_logprobs": [None if item is None else item.logprob for item in told],
        "top_logprobs": [
            None if item is None else {item.token: item.logprob} | {token: p for token, _, p in item.top[:top]}
            for item in told
        ],
        "text_offset": offsets,
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts of the legacy arrays, one behind the other."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(prompt: PromptTokens, top: int) -> list[dict[str, Any] | None]:
    """vLLM's form: of each token its own and the likeliest ones, by token id; None of the first."""
    told: list[dict[str, Any] | None] = []
    for item in prompt.logprobs or []:
        if item is None:
            told.append(None)
            continue
        likeliest = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token}
            for rank, (token, token_id, logprob) in enumerate(item.top[:top], 1)
        }
        own = {"logprob": item.logprob, "rank": item.rank, "decoded_token": item.token}
        told.append({str(item.token_id): own, **likeliest})
    return told


def told_of_prompt(request: GenerateRequest, prompt: PromptTokens | None) -> dict[str, Any]:
    """The fields that a request's ``prompt_logprobs`` and ``return_token_ids`` ask for."""
    found: dict[str, Any] = {}
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(prompt, request.prompt_logprobs) if prompt is not None else None
    if request.return_token_ids:
        found["prompt_token_ids"] = list(prompt.token_ids) if prompt is not None else None
    return found
