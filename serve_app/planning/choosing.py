"""What indexers, and attention to the keys that they choose, take in a step: counted from serve_app/models/indexed.py
and serve_app/kernels/chosen.py, which both work in parts, and checked by ``python -m benchmarks planned``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from serve_app.planning.cache import LayerCache, has_indexers, has_latents

# Bytes of scores and of gathered keys that one part has: serve_app/models/indexed.py and serve_app/kernels/chosen.py
# have the same.
SCORES = 128 << 20
GATHERED = 64 << 20
# A part of gathered keys is counted as keys and values of four bytes a number at least.
_COUNTED = 2 * 4


@dataclass(slots=True, frozen=True)
class Choosing:
    """``heads`` of ``width`` numbers score a text's tokens, or pools of ``pool`` of them, and ``most`` tokens are
    chosen, which other layers may take over (``handed_on``). Attention gathers so many ``numbers`` of each: of what is
    key and value of all heads (``shared``), or of all heads' keys and values, which ranks divide.
    """

    heads: int
    width: int
    most: int
    numbers: int
    shared: bool
    pool: int = 0
    handed_on: bool = False


def choosing_of(full: Any, caches: Iterable[LayerCache]) -> Choosing | None:
    """``full``: transformers' configuration with its defaults. None for models without indexers."""
    if not has_indexers(full):
        return None
    text = full.get_text_config()
    shared = True
    if any(cache.kind == "latent" for cache in caches):
        numbers = int(text.kv_lora_rank + text.qk_rope_head_dim)
    elif has_latents(full):
        widest = max(text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
        numbers, shared = 2 * int(text.num_attention_heads * widest), False
    else:  # DeepSeek V4, whose keys are their own values
        numbers = int(text.head_dim)
    pool = int(getattr(text, "index_kpool", None) or 0)
    return Choosing(
        heads=int(text.index_n_heads), width=int(text.index_head_dim), most=int(text.index_topk) + max(0, pool - 1),
        numbers=numbers, shared=shared, pool=pool,
        handed_on="shared" in (getattr(text, "indexer_types", None) or ()),
    )  # fmt: skip


def choosing_bytes(
    choosing: Choosing, *, rows: int, texts: int, context: int, ranks: int, queries: int, item: int
) -> int:
    """Of ``rows`` of up to ``texts`` texts of up to ``context`` tokens, on one of ``ranks`` that has so many heads'
    ``queries`` and computes with numbers of ``item`` bytes.
    """
    count = min(choosing.most, context)
    if count == context:  # all are attended to as in other models
        return rows * _query_bytes(choosing, item)
    # Which are chosen for each row, by pieces and put together, and those that the last layers had.
    chosen = (3 if choosing.handed_on else 2) * 4 * rows * count
    return chosen + max(
        _scoring(choosing, rows, texts, context, item), _attending(choosing, rows, count, ranks, queries, item)
    )


def _query_bytes(choosing: Choosing, item: int) -> int:
    """Of a row's queries and its own key: as they are projected, and rotated parts put together with the rest."""
    if choosing.pool:
        return (choosing.heads * choosing.width + 6 * choosing.width) * item
    return 3 * (choosing.heads + 1) * choosing.width * item


def _scoring(choosing: Choosing, rows: int, texts: int, context: int, item: int) -> int:
    """One call of an indexer at its peak, or one on all rows of texts that have all of their tokens chosen."""
    width = choosing.width
    pairs = min(rows * context, max(context, SCORES // (4 * choosing.heads)))
    most = min(rows, max(1, pairs // choosing.most))
    picked = most * choosing.most
    queries = most * (_query_bytes(choosing, item) + 4 * choosing.heads * width)
    if choosing.pool:
        # Tokens' keys and weights; the same by pools, where weights become shares; then scores as they are and scaled.
        pooling = context * (width * (2 * item + 12) + 40)
        scores = 8 * choosing.heads * -(-pairs // choosing.pool) + 12 * pairs + 32 * picked
        found = context * (2 * width + 1) * item + max(pooling, scores)
    else:
        # Of one text, or of several with a row each.
        keys = width * max(context, min(texts * context, SCORES // (4 * max(choosing.heads, width))))
        scores = 4 * choosing.heads * pairs
        # Keys as they lie and in float32, then scores as they are and scaled.
        found = keys * item + 12 * pairs + 16 * picked + scores + max(4 * keys if item < 4 else 0, scores)
    return max(rows * _query_bytes(choosing, item), queries + found)


def _attending(choosing: Choosing, rows: int, count: int, ranks: int, queries: int, item: int) -> int:
    """One part of gathered keys: as they are found and put together, values without what is not chosen; and scores."""
    numbers = count * (choosing.numbers if choosing.shared else choosing.numbers // 2 // ranks)
    part = min(rows, max(1, GATHERED // (_COUNTED * numbers)))
    copies = 4 if choosing.shared else 6
    return part * (numbers * copies * item + count * (queries * (8 + (item if item < 4 else 0)) + 48))
