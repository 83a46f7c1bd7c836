"""12 bits for a bfloat16 value: every bit of every weight comes back, and a pass on them gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.kernels.decoder import decoder_library, paired_order, plain_order
from serve_app.kernels.linear import compact, panels
from serve_app.models.loading.compare import probe
from tests import tiny

pytestmark = pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")
SPECIAL = [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0xFF7F, 0x3F80, 0x0D00, 0x8D7F]


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed, with values of every kind in between."""
    generator = torch.Generator().manual_seed(seed)
    bits = (torch.randn(n, k, generator=generator) * 0.02).bfloat16().view(torch.int16).view(-1)
    places = torch.randperm(n * k, generator=generator)[: 3 * len(SPECIAL)]
    bits[places] = torch.tensor(SPECIAL * 3, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(n, k)


def unpacked(packed: np.ndarray, extra: compact.Compact, rows: int, k: int) -> np.ndarray:
    """Bits uint16 [rows, k], read back as ``cpu/compact.h`` describes the layout."""
    found = np.zeros((rows, k), np.uint16)
    blocks = -(-k // compact.BLOCK_COLUMNS)
    units = packed.reshape(rows // 64, k // 2, 192)
    for panel in range(rows // 64):
        for pair in range(k // 2):
            unit = units[panel, pair]
            for element in range(128):
                vector, lane = element // 32, element % 32 // 8
                at = vector // 2 * 64 + lane * 16 + vector % 2 * 8 + element % 8
                code = unit[128 + at % 64] >> (4 if at >= 64 else 0) & 15
                high = int(extra.tables[panel, code])
                found[panel * 64 + element // 2, 2 * pair + element % 2] = high << 8 | int(unit[at])
        for block in range(blocks):
            low, end = extra.starts[panel * blocks + block : panel * blocks + block + 2]
            for entry in extra.values[low:end].tolist():
                place, bits = entry >> 16, entry & 0xFFFF
                pair, element = block * 8 + place // 128, place % 128
                found[panel * 64 + element // 2, 2 * pair + element % 2] = bits
    return found


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("k", [32, 80])
def test_every_bit_comes_back(paired, k):
    library = decoder_library()
    n = 128 if paired else 100
    source = weight(n, k)
    order = paired_order(n // 2) if paired else plain_order(n)
    extra = compact.survey(library, source, order, 2)
    assert extra is not None and 0 < extra.exceptions <= 3 * len(SPECIAL) + 0.003 * n * k
    packed = np.zeros(compact.compact_bytes(len(order), k), np.uint8)
    compact.pack(library, source, order, 2, extra, packed.ctypes.data)
    got = unpacked(packed, extra, len(order), k)
    want = source.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(got[order >= 0], want[order[order >= 0]])
    assert not got[order < 0].any()


def test_weights_of_every_size_stay_as_they_are():
    bits = torch.randint(-(2**15), 2**15, (64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    assert compact.survey(decoder_library(), bits.view(torch.bfloat16), plain_order(64), 1) is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_pass_gives_the_same_numbers(family, threads, tmp_path, monkeypatch):
    """From one row, which is passed once, to more than are kept at a time."""
    path = tiny.write_checkpoint(tmp_path, family, hidden_size=160, intermediate_size=1184, head_dim=32, vocab_size=331)
    models = {}
    for limit in (0, 1 << 60):
        monkeypatch.setattr(panels, "COMPACT_ABOVE_BYTES", limit)
        models[limit] = tiny.load(path, dtype="bfloat16", optimise=True)
    small, plain = models.values()
    assert small.forward.packed_bytes < 0.8 * plain.forward.packed_bytes == 0.8 * plain.forward.plain_bytes
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(probe(small, small.forward), probe(plain, plain.forward))
        for rows in (1, 5, 8, 14, 24, 30, 49, 110):
            answers = []
            for model in (small, plain):
                engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=128)
                for number in range(rows):
                    prompt = [3 + (number * 7 + i) % 250 for i in range(1 + number % 3)]
                    engine.add(tiny.make_request(str(number), prompt, max_tokens=4))
                answers.append(tiny.run_all(engine))
            assert answers[0] == answers[1]
    finally:
        torch.set_num_threads(before)
