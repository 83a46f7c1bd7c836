"""When each word of a segment was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words


def words(
    tokenizer: Any, tokens: Sequence[int], times: Sequence[float] | None, start: float, end: float, language: str
) -> list[dict[str, Any]]:
    """``tokens`` of text as words with ``start`` and ``end``. ``times``: when each token begins, by the model's
    attention; None: of a model that does not tell, whose words share the segment's time by their length.
    """
    if not tokens:
        return []
    texts, _, places = _combine_tokens_into_words(tokenizer, list(tokens), language)
    if times is not None:
        begins = [times[group[0]] for group in places]
    else:
        total, at, begins = max(1, sum(map(len, texts))), 0, []
        for text in texts:
            begins.append(start + (end - start) * at / total)
            at += len(text)
    # Attention may look back, and beyond the segment.
    begins = [min(max(begin, start), end) for begin in begins]
    for place in range(1, len(begins)):
        begins[place] = max(begins[place], begins[place - 1])
    ends = [*begins[1:], end]
    return [
        {"word": text.strip(), "start": round(begin, 3), "end": round(stop, 3)}
        for text, begin, stop in zip(texts, begins, ends, strict=True)
        if text.strip()
    ]
