"""What the engine and its peers are given: prompts and how many tokens are to follow."""

from __future__ import annotations

PROMPT, NEW = 128, 64


def prompts(lengths: list[int]) -> list[list[int]]:
    """Distinct plain token ids, so that no prefix is shared."""
    return [[(7 * row + 13 * col) % 8000 + 10 for col in range(length)] for row, length in enumerate(lengths)]


def workloads(batches: list[int], mixed: bool, new: int = NEW) -> dict[str, tuple[list[int], list[int]]]:
    """Name -> prompt lengths and new tokens; ``mixed`` adds one that mixes lengths as traffic does."""
    found = {f"batch {b}": ([PROMPT] * b, [new] * b) for b in batches}
    if mixed:
        found["mixed"] = [16 + (i * 151) % 497 for i in range(32)], [8 + (i * 53) % 121 for i in range(32)]
    return found
