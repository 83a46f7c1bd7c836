"""What becomes of drafted tokens, and of those that were drawn."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.engine.request import FINISH_LENGTH, FINISH_STOP, Request


def accept(draft: list[int], sampled: list[int]) -> int:
    """How many draft tokens stand.

    Row j was sampled from the target's distribution given the drafts before it, so draft j stands exactly if the target
    drew the same token, and the first row that disagrees supplies the token in its place. For a deterministic draft
    this is the rejection sampling of arXiv 2211.17192 (accepted with probability p(x), replaced by p without x), and
    because row j's random number is fixed by the position, even sampled output is the same as without drafts.
    """
    accepted = 0
    for drafted, drawn in zip(draft, sampled, strict=False):
        if drawn != drafted:
            break
        accepted += 1
    return accepted


def append(
    request: Request, token_ids: Sequence[int], last: str | None, ends: frozenset[int], longest: int
) -> list[int]:
    """Appends tokens up to the one that ends the request (one of the model's ``ends``, or the ``longest``-th of all),
    which the last does with reason ``last`` where that is given; returns those appended.
    """
    sampling = request.sampling
    new: list[int] = []
    for token in token_ids:
        request.tokens.append(token)
        new.append(token)
        if token in sampling.stop_token_ids or (token in ends and not sampling.ignore_eos):
            request.finish_reason = FINISH_STOP
        elif request.output_len >= sampling.max_tokens or len(request.tokens) >= longest:
            request.finish_reason = FINISH_LENGTH
        if request.finish_reason is not None:
            break
    if last is not None and len(new) == len(token_ids) and request.finish_reason != FINISH_STOP:
        request.finish_reason = last
    # Drafts accepted behind the last token are computed, but no token of the request.
    request.computed = min(request.computed, len(request.tokens) - 1)
    return new
