"""How the work of one attention call is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.kernels.gpu.common import next_power_of_2

MAX_SPLITS = 64
PREFILL_SPLITS = 8
# Of a program, in bytes: an H100's, less a little; an A100 has 163 KiB, an L40S 99.
LARGE_SHARED = 220 << 10
# Fewer decodes beside a prompt are not worth a launch.
MIN_DECODES = 8


@dataclass(slots=True, frozen=True)
class BatchSlice:
    """Requests ``first`` to ``last`` of a batch and their tokens."""

    first: int
    last: int
    first_token: int
    last_token: int
    max_query_len: int

    @property
    def requests(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return self.last_token - self.first_token

    def divided(self, decodes: int) -> list[BatchSlice]:
        """In two where enough ``decodes``, requests of one token, stand at the head of a batch of prompts."""
        if self.max_query_len == 1 or decodes < MIN_DECODES:
            return [self]
        return [
            BatchSlice(0, decodes, 0, decodes, 1),
            BatchSlice(decodes, self.last, decodes, self.last_token, self.max_query_len),
        ]


@dataclass(slots=True, frozen=True)
class Launch:
    """How one call is cut into programs: ``tiles`` x KV heads x ``splits``."""

    tiles: int
    splits: int
    block_m: int
    block_n: int
    warps: int
    stages: int


def plan_launch(
    *,
    requests: int,
    tokens: int,
    max_query_len: int,
    max_seq_len: int,
    group: int,
    kv_heads: int,
    dim: int,
    item_bytes: int,
    units: int,
    shared: int,
) -> Launch:
    """Tile sizes and splits for a batch on a device of ``units`` multiprocessors with ``shared`` bytes of shared memory
    a program.

    ``max_seq_len`` only bounds the splits: under a CUDA graph it is the longest sequence that may come.
    """
    least = max(16, next_power_of_2(group))
    row_bytes = next_power_of_2(dim) * item_bytes  # of a head: more leaves less room for tiles in shared memory
    wide = row_bytes > 256
    if item_bytes == 4:
        # Multiplied without tensor cores, to the last bit: larger tiles only take longer to compile (a minute each).
        block_m, block_n, warps, stages = max(least, 16), 16 if wide else 32, 4, 2
        tiles = requests if max_query_len == 1 else tokens // (block_m // group) + requests
    elif row_bytes > 512:
        block_m, block_n, warps, stages = least, 16, 4, 2
        tiles = requests if max_query_len == 1 else tokens // (block_m // group) + requests
    elif max_query_len == 1:
        block_m, block_n, warps, stages = least, 32 if wide else 64, 4, 3
        tiles = requests
    else:
        block_m = max(least, 16 if max_query_len * group <= 16 else 64 if wide or max_query_len * group <= 64 else 128)
        block_n, warps, stages = 32 if wide else 64, 8 if block_m >= 128 else 4, 2 if wide else 3
        if block_m == 128 and not wide and shared >= LARGE_SHARED:
            # As measured on an H100 by `benchmarks gpu_tune`.
            block_n, stages = 128, 4
        tiles = tokens // (block_m // group) + requests
    # Two waves of programs hide the latency of the first loads; each split should have two tiles of keys at least.
    wanted = -(-2 * units // (tiles * kv_heads))
    splits = min(wanted, max(1, max_seq_len // (2 * block_n)), MAX_SPLITS)
    splits = 1 << (splits.bit_length() - 1)
    if max_query_len > 1 and splits > 1:
        # Each number of splits is a kernel to compile, and these are not compiled ahead as those of decode graphs are.
        splits = PREFILL_SPLITS if splits >= PREFILL_SPLITS // 2 else 1
    return Launch(tiles, splits, block_m, block_n, warps, stages)
