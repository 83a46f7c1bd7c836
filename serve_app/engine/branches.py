"""Requests that have a beginning in common to the last token, such as questions about one text.

The prefix cache shares whole blocks. So one request computes the beginning and nothing else, and what it leaves of a
last block is named as well; each of the others takes a copy of it and goes on from there::

    shared, 70 tokens   | block 7, full | block 8, full | block 9, 6 of 32 |
    a question          | block 7       | block 8       | block 12: a copy of 9, then its own tokens |

A tail that is gone is computed again, like any block.
"""

from __future__ import annotations

from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool
from serve_app.engine.request import Request
from serve_app.kv.keys import tail_key


def seal_tail(request: Request, blocks: BlockPool) -> None:
    """Names the last block of a request that has computed what others share; ``request.keys`` are those of its full
    blocks.
    """
    if request.shared == len(request.tokens) and request.shared % BLOCK_TOKENS:
        blocks.seal(request.blocks[request.shared // BLOCK_TOKENS], name_at(request, request.shared))


def find_tail(request: Request, hits: int, reusable: int, blocks: BlockPool) -> list[int]:
    """The block to copy for a request of whose tokens ``reusable`` may come from the cache, behind ``hits`` cached
    blocks; none where there is none.
    """
    full, rest = divmod(request.shared, BLOCK_TOKENS)
    if not rest or hits != full or request.shared > reusable:
        return []
    return blocks.match([name_at(request, request.shared)])


def name_at(request: Request, end: int) -> bytes:
    """The key of the block, full or not, with which a request's first ``end`` tokens end; ``request.keys`` has those of
    full ones.
    """
    full, rest = divmod(end, BLOCK_TOKENS)
    parent = request.keys[full - 1] if full else request.root
    if not rest:
        return parent
    start = full * BLOCK_TOKENS
    return tail_key(parent, request.tokens[start:end], media=request.media, start=start)
