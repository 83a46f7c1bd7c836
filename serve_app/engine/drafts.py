"""What becomes of drafted tokens."""

from __future__ import annotations


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
