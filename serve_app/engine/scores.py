"""Log-probabilities of a prompt's own tokens: row i of the prompt tells that of token i + 1.

A row's logits are as wide as the vocabulary, so a step computes them for some hundred rows at most
(:attr:`serve_app.engine.scheduler.Scheduler.score_rows`), and what is kept of a row are a few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.engine.gpu.staging import to_device
from serve_app.sampling_params import PromptLogprobs

if TYPE_CHECKING:
    from serve_app.engine.request import Request
    from serve_app.engine.step import Scheduled

# Logits of one step for this purpose; 64 MiB in float32.
LOGITS_PER_STEP = 1 << 24
# Log-probability of a token that is never drawn.
NEVER = -9999.0


def score_rows(vocab_size: int) -> int:
    """How many rows of a step may tell log-probabilities of prompt tokens."""
    return max(1, LOGITS_PER_STEP // vocab_size)


def untold(request: Request, start: int, count: int) -> int:
    """How many of ``count`` rows from ``start`` on have something to tell of the prompt."""
    if request.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(start + count, request.score_end) - max(start, request.scored))


def scorable(request: Request, start: int, count: int, rows: int) -> int:
    """How many of ``count`` tokens from ``start`` on a step computes in which so many ``rows`` may tell something."""
    if untold(request, start, count) <= rows:
        return count
    return max(start, request.scored) + rows - start


@dataclass(slots=True)
class Scores:
    """Of n consecutive prompt tokens: ``own`` [n], ``ranks`` [n] from 1, ``top_ids`` and ``top`` [n, k]."""

    own: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]


def take_scores(scheduled: list[Scheduled], logits: Tensor) -> tuple[list[Scores | None], Tensor]:
    """Reads off ``logits`` [S, V] what is told of prompt tokens, one entry per scheduled request; and gives the rows
    that are left, which are those to sample from.
    """
    found: list[Scores | None] = []
    left = []
    at = 0
    for item in scheduled:
        found.append(_scores(item, logits[at : at + item.scores]) if item.scores else None)
        left.append(np.arange(at + item.scores, at + item.scores + item.samples))
        at += item.scores + item.samples
    [rows] = to_device([np.concatenate(left).astype(np.int64)], logits.device)
    return found, logits[rows]


def _scores(item: Scheduled, logits: Tensor) -> Scores:
    first = item.start + item.first_score + 1
    targets = np.array(item.request.tokens[first : first + item.scores], np.int64)
    # What stands for a picture may have an embedding and no logit (Llama 3.2 Vision).
    drawn = targets < logits.shape[1]
    wanted, known = to_device([np.where(drawn, targets, 0), drawn], logits.device)
    told = torch.log_softmax(logits.float(), -1)
    own = told.gather(1, wanted[:, None]).masked_fill(~known[:, None], NEVER)
    ranks = (told > own).sum(-1) + 1
    top, ids = told.topk(min(item.request.sampling.prompt_logprobs or 0, told.shape[1]), -1)
    return Scores(
        own.squeeze(1).cpu().numpy(),
        ranks.int().cpu().numpy(),
        ids.int().cpu().numpy(),
        top.cpu().numpy(),
    )


def told(request: Request) -> PromptLogprobs | None:
    """What a request that has ended tells of its prompt, where that is asked for."""
    top = request.sampling.prompt_logprobs
    return None if top is None or request.finish_reason is None else joined(request.scores, top)


def joined(scores: list[Scores], top: int) -> PromptLogprobs:
    """All of a prompt's, as they travel."""

    def packed(name: str, kind: type) -> bytes:
        return b"".join(np.ascontiguousarray(getattr(part, name), kind).tobytes() for part in scores)

    top = scores[0].top.shape[1] if scores else top
    return PromptLogprobs(
        top,
        packed("own", np.float32),
        packed("ranks", np.int32),
        packed("top_ids", np.int32),
        packed("top", np.float32),
    )
