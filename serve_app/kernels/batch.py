"""What attention needs to know of a batch, whoever made it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

BLOCK = 32  # tokens per KV block


class AttentionBatch(Protocol):
    """R requests with T query tokens, all on the device of the cache; ``engine.step.Batch`` is one."""

    @property
    def query_start(self) -> Tensor: ...  # [R+1] int32
    @property
    def seq_lens(self) -> Tensor: ...  # [R] int32
    @property
    def block_tables(self) -> Tensor: ...  # [R, max_blocks] int32
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def total_seq_len(self) -> int: ...  # sum of seq_lens, 0 where the host does not know it
    @property
    def decodes(self) -> int: ...  # at least so many requests at the head of the batch have one query
