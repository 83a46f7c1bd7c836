"""How work is divided among the steps that are under way in a pipeline: what engines do, and what plans count on."""

from __future__ import annotations

# Fewer generating requests are not divided, and a step has no fewer tokens of prompts if there are as many: below,
# what a step takes does not depend on how much is in it.
LEAST_ROWS = 4
LEAST_TOKENS = 256
# Into so many pieces for each stage the prompts of a whole batch are divided. The first piece and the last one leave
# stages idle.
PIECES = 2


def rows_of_a_step(generating: int, depth: int) -> int:
    """Of so many requests that generate, where ``depth`` steps are under way at a time."""
    return max(LEAST_ROWS, -(-generating // depth))


def tokens_of_a_step(batch_tokens: int, depth: int) -> int:
    """At most, where one step alone would have ``batch_tokens``."""
    return min(batch_tokens, max(LEAST_TOKENS, -(-batch_tokens // (PIECES * depth))))
