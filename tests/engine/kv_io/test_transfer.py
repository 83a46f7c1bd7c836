"""K/V that leave an engine come back as they were, whatever part of them is wanted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.blocks import blocks_for
from serve_app.engine.kv_cache import KVCache, KVShape
from serve_app.engine.kv_io.preload import preload
from serve_app.engine.kv_io.transfer import (
    ChunkExporter,
    HostCopy,
    LoadedPiece,
    StoredPrefix,
    load_prefix,
)
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.keys import CHUNK_TOKENS, block_keys, tail_key
from tests import tiny
from tests.engine.fake import (
    ROOT,
    Answer,
    HistoryModel,
    answer_alone,
    collect,
    make_engine,
    random_prompt,
    request,
    take,
)

BLOCKS = 40


def random_kv(seed: int, device="cpu") -> KVCache:
    cache = KVShape.uniform(2, 2, 3, torch.float32).allocate(BLOCKS, device)
    return fill(cache, seed)


def fill(cache: KVCache, seed: int) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    for plane in cache.planes:
        plane.copy_(torch.randn(plane.shape, generator=generator))
    return cache


def snapshot(kv: KVCache) -> torch.Tensor:
    return kv.planes[0].clone()


def tokens_of(kv: torch.Tensor, blocks: list[int], count: int) -> torch.Tensor:
    """The sequence's K/V in order: [count, L, 2, Hkv, D]."""
    rows = [kv[:, :, blocks[i // 32], :, i % 32] for i in range(count)]
    return torch.stack(rows)


def pieces(kv: KVCache, blocks: list[int], cuts: list[int], tokens: int) -> list[LoadedPiece]:
    """The first ``tokens`` tokens, cut into pieces at the block numbers ``cuts``; every second one lies inside a larger
    payload.
    """
    borders = sorted({0, *cuts, blocks_for(tokens)})
    found = []
    for index, (a, b) in enumerate(zip(borders, borders[1:], strict=False)):
        before = index % 2
        payload = kv.copy_out([7] * before + blocks[a:b] + [9] * before)
        found.append(LoadedPiece(a * 32, min(b * 32, tokens) - a * 32, payload, before))
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), tokens=st.integers(1, 300))
def test_any_part_of_any_pieces_round_trips(data, tokens):
    count = blocks_for(tokens)
    rng = random.Random(tokens)
    source, target = random_kv(1), random_kv(2)
    there, here = rng.sample(range(1, BLOCKS), count), rng.sample(range(1, BLOCKS), count)
    cuts = data.draw(st.lists(st.integers(0, count), max_size=4))
    stored = pieces(source, there, cuts, tokens)
    end = data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, (end - 1) // 32)) * 32
    # What the pool was asked for may begin anywhere up to where it is needed.
    stored = [p for i, p in enumerate(stored) if p.start + p.tokens > start or i == len(stored) - 1]
    prefix = StoredPrefix(stored)
    before = snapshot(target)
    load_prefix(target, here, prefix, start, end)
    target, source = snapshot(target), snapshot(source)
    assert torch.equal(tokens_of(target, here, end)[start:], tokens_of(source, there, end)[start:])
    touched = here[start // 32 : blocks_for(end)]
    others = [b for b in range(BLOCKS) if b not in touched]
    assert torch.equal(target[:, :, others], before[:, :, others])


def test_begin_and_end():
    assert (StoredPrefix().begin, StoredPrefix().end) == (0, 0)
    prefix = StoredPrefix([LoadedPiece(64, 32, torch.empty(0)), LoadedPiece(96, 7, torch.empty(0))])
    assert (prefix.begin, prefix.end) == (64, 103)


def test_a_gap_before_the_prefix_raises():
    kv = random_kv(0)
    prefix = StoredPrefix([LoadedPiece(64, 32, kv.copy_out([5]))])
    before = snapshot(kv)
    with pytest.raises(ValueError, match="64"):
        load_prefix(kv, [1, 2, 3], prefix, 32, 96)
    assert torch.equal(kv.planes[0], before)
    load_prefix(kv, [1, 2, 3], prefix, 64, 96)
    assert torch.equal(kv.planes[0][:, :, 3], before[:, :, 5])


@pytest.mark.gpu
def test_bytes_leave_a_gpu_beside_its_steps():
    kv = random_kv(0, "cuda")
    expected = kv.copy_out([3, 9]).cpu()
    copy = HostCopy(kv.copy_out([3, 9]))
    kv.planes[0].zero_()  # the engine goes on
    assert np.array_equal(copy(), expected.numpy())


# --- into a running engine ------------------------------------------------------------------------


def fake_prefix(tokens: list[int], start: int, end: int) -> StoredPrefix:
    """What a :class:`HistoryModel` would have written for tokens [start, end)."""
    data = torch.zeros(1, 2, blocks_for(end) - start // 32, 1, 32, 1)
    data[0, 0].view(-1)[: end - start] = torch.tensor(tokens[start:end], dtype=torch.float32)
    return StoredPrefix([LoadedPiece(start, end - start, data.view(torch.uint8).flatten())])


@pytest.mark.parametrize(
    ("held", "start", "end", "cached"),
    [
        (0, 0, 64, 64),
        (0, 0, 77, 77),  # a tail
        (0, 0, 100, 99),  # the last token is always computed
        (64, 0, 90, 90),  # more than needed: the first blocks are here already
        (64, 32, 90, 90),
        (64, 64, 96, 96),
        (96, 32, 64, 96),  # our own cache reaches further
        (32, 64, 96, 32),  # it begins behind what is here: of no use
        (0, 32, 96, 0),
    ],
)
def test_a_stored_prefix_saves_its_tokens_and_changes_nothing(held, start, end, cached):
    model = HistoryModel()
    prompt = random_prompt(0, 100)
    engine = make_engine(model)
    if held:
        engine.add(request("earlier", prompt[: held + 1], max_tokens=1))
        collect(engine)
    one = request("x", prompt, logprobs=2, ignore_eos=True)
    alone = answer_alone(model, prompt, one.sampling)
    computed = engine.stats.prompt_tokens
    engine.add(one, fake_prefix(prompt, start, end))
    assert collect(engine)["x"] == alone
    assert one.cached == cached
    assert engine.stats.prompt_tokens - computed == 100 - cached
    # What was copied in is a hit for the next.
    again = request("again", prompt)
    engine.add(again)
    assert collect(engine)["again"].tokens == alone.tokens
    assert again.cached == 96


def test_a_prefix_waits_with_its_request_and_goes_with_it():
    model = HistoryModel()
    engine = make_engine(model, num_blocks=5)
    engine.add(request("first", random_prompt(1, 90), max_tokens=20))
    prompt = random_prompt(0, 70)
    waits, leaves = request("waits", prompt), request("leaves", prompt)
    engine.add(waits, fake_prefix(prompt, 0, 64))
    engine.add(leaves, fake_prefix(prompt, 0, 64))
    engine.step()
    engine.abort("leaves")
    answers: dict = {"first": Answer([0], "", None)}
    while engine.has_work:
        take(engine.step(), answers)
    assert answers["waits"] == answer_alone(model, prompt, waits.sampling)
    assert waits.cached == 64


def test_what_arrives_early_is_found_like_ones_own():
    model, prompt = HistoryModel(), random_prompt(0, 100)
    engine = make_engine(model)
    keys = block_keys(ROOT, prompt)
    for start, end, copied in ((0, 64, 2), (0, 64, 0), (32, 96, 1), (96, 99, 0)):
        [piece] = fake_prefix(prompt, start, end).pieces
        assert preload(engine, keys, piece) == copied
        engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0
    one = request("x", prompt)
    engine.add(one, fake_prefix(prompt, 0, 99))
    assert collect(engine)["x"] == answer_alone(model, prompt, one.sampling)
    assert one.cached == 99 and engine.stats.prompt_tokens == 1


def test_nothing_arrives_early_where_there_is_no_room():
    model, prompt = HistoryModel(), random_prompt(0, 100)
    engine = make_engine(model, num_blocks=5)
    engine.add(request("busy", random_prompt(1, 90), max_tokens=10, ignore_eos=True))
    outputs = engine.step()
    [piece] = fake_prefix(prompt, 0, 96).pieces
    assert preload(engine, block_keys(ROOT, prompt), piece) == 0
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 10


# --- exporting ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.load(tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama"))


Chunks = list[tuple[ChunkMeta, torch.Tensor]]


def exporting(engine) -> Chunks:
    """Plugs an exporter in; what it emits appears in the list that is returned."""
    chunks: Chunks = []
    kv = engine.runner.kv

    def emit(name, meta, copy):
        payload = copy()
        assert name == "p" and payload.nbytes == meta.nbytes and meta.layout == kv.shape.layout.name
        held = kv.shape.allocate(meta.n_blocks, "cpu")
        held.copy_in(list(range(meta.n_blocks)), torch.from_numpy(payload))
        chunks.append((meta, held.planes[0]))

    engine.exporter = ChunkExporter(kv, emit)
    return chunks


def exported(model, prompt: list[int], *, held: int | None, **sampling) -> Chunks:
    engine = tiny.make_engine(model, max_batch_tokens=90)
    chunks = exporting(engine)
    engine.add(tiny.make_request("p", prompt, **sampling), held=held)
    tiny.run_all(engine)
    return chunks


def spans(chunks: Chunks) -> list[tuple[int, int]]:
    return [(m.start_token, m.end_token) for m, _ in chunks]


def recomputed(model, tokens: list[int]) -> torch.Tensor:
    """K/V [len(tokens), L, 2, Hkv, D] from a single pass of another engine."""
    engine = tiny.make_engine(model)
    one = tiny.make_request("r", [*tokens, 5], max_tokens=2, ignore_eos=True)
    engine.add(one)
    engine.step()
    return tokens_of(engine.runner.kv.planes[0], one.blocks, len(tokens))


@pytest.mark.parametrize("length", [1, 31, 32, 255, 256, 257, 300, 512, 530])
def test_chunks_hold_what_another_engine_would_compute(model, length):
    prompt = random_prompt(length, length, 256)
    chunks = exported(model, prompt, held=0, prefill_only=True)
    assert [m.start_token for m, _ in chunks] == list(range(0, length, CHUNK_TOKENS))
    assert sum(m.n_tokens for m, _ in chunks) == length
    keys = block_keys(tiny.ROOT, prompt)
    assert [k for m, _ in chunks for k in m.block_keys] == keys
    tail = prompt[len(keys) * 32 :]
    assert chunks[-1][0].tail_key == (tail_key(keys[-1] if keys else tiny.ROOT, tail) if tail else None)
    got = torch.cat([tokens_of(data, list(range(data.shape[2])), m.n_tokens) for m, data in chunks])
    torch.testing.assert_close(got, recomputed(model, prompt), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("held", "first"), [(0, 0), (100, 0), (256, 256), (300, 256), (512, 512)])
def test_what_the_pool_holds_is_not_sent_again(model, held, first):
    chunks = exported(model, random_prompt(0, 600, 256), held=held, prefill_only=True)
    assert [m.start_token for m, _ in chunks] == list(range(first, 600, CHUNK_TOKENS))


def test_a_generating_request_exports_its_prompt_and_its_output(model):
    prompt = random_prompt(0, 250, 256)
    chunks = exported(model, prompt, held=0, max_tokens=80, ignore_eos=True)
    # 329 tokens have K/V: the last one drawn is never computed.
    assert spans(chunks) == [(0, 256), (256, 320)] and [m.tail_key for m, _ in chunks] == [None, None]
    tokens = prompt + tiny.run_all(engine_with(model, prompt, max_tokens=80))["x"]
    assert [k for m, _ in chunks for k in m.block_keys] == block_keys(tiny.ROOT, tokens[:320])
    got = torch.cat([tokens_of(data, list(range(data.shape[2])), m.n_tokens) for m, data in chunks])
    torch.testing.assert_close(got, recomputed(model, tokens[:320]), atol=1e-5, rtol=1e-4)


def engine_with(model, prompt, max_tokens=20):
    engine = tiny.make_engine(model)
    engine.add(tiny.make_request("x", prompt, max_tokens=max_tokens, ignore_eos=True))
    return engine


@pytest.mark.parametrize(
    ("held", "prompt", "output", "expected"),
    [
        (0, 40, 20, []),  # one block: not worth an object
        (0, 40, 25, [(0, 64)]),
        (32, 40, 40, []),  # one block more than the pool has
        (32, 40, 60, [(0, 96)]),  # most of it is new: it takes the place of what was there
        (160, 170, 60, [(160, 224)]),  # most of it is there: only what is new
        (160, 170, 200, [(160, 256), (256, 352)]),
        (100, 170, 200, [(0, 256), (256, 352)]),
        (250, 260, 100, [(224, 256), (256, 352)]),
    ],
)
def test_short_answers_make_few_and_small_chunks(held, prompt, output, expected):
    engine = make_engine(HistoryModel())
    chunks = exporting(engine)
    engine.add(request("p", random_prompt(1, prompt), max_tokens=output, ignore_eos=True), held=held)
    collect(engine)
    new = sum(end - max(start, held) for start, end in spans(chunks))
    assert spans(chunks) == expected
    assert sum(end - start for start, end in expected) <= 2 * new + 31


class Guesses:
    """Drafts of which the first ``right`` are what the model will say and the rest is not."""

    def __init__(self, answer: list[int], prompt: int, right: int) -> None:
        self._answer, self._prompt, self._right = answer, prompt, right

    def before_step(self, running, max_model_len):
        for one in running:
            if one.pending == 1:
                at = len(one.tokens) - self._prompt
                ahead = self._answer[at : at + 5]
                one.draft[:] = ahead[: self._right] + [(t + 1) % 32 for t in ahead[self._right :]]

    def after_step(self, *about) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize("right", [0, 2, 5])
def test_no_rejected_draft_is_ever_published(right):
    """The model's K are its tokens, so that a chunk shows whose they are."""
    model, prompt = HistoryModel(), random_prompt(2, 60)
    one = request("p", prompt, max_tokens=270, ignore_eos=True)
    answer = answer_alone(model, prompt, one.sampling).tokens
    engine = make_engine(model, speculation=Guesses(answer, len(prompt), right))
    chunks = exporting(engine)
    engine.add(one, held=0)
    assert collect(engine)["p"].tokens == answer
    assert spans(chunks) == [(0, 256), (256, 320)]
    published = torch.cat([data[0, 0, :, 0, :, 0].reshape(-1) for _, data in chunks])
    assert published.tolist() == (prompt + answer)[:320]
    assert [k for m, _ in chunks for k in m.block_keys] == block_keys(one.root, (prompt + answer)[:320])


def test_an_aborted_answer_is_published_but_not_after_a_failed_step():
    for export, expected in ((True, [(0, 96)]), (False, [])):
        engine = make_engine(HistoryModel())
        chunks = exporting(engine)
        engine.add(request("p", random_prompt(3, 90), max_tokens=100, ignore_eos=True), held=0)
        for _ in range(15):
            engine.step()
        engine.abort("p", export=export)
        assert spans(chunks) == expected


def test_a_preempted_request_exports_each_token_once():
    engine = make_engine(HistoryModel(), num_blocks=12)
    chunks = exporting(engine)
    engine.add(request("first", random_prompt(5, 100), max_tokens=150, ignore_eos=True))
    one = request("p", random_prompt(4, 100), max_tokens=180, ignore_eos=True)
    engine.add(one, held=0)
    collect(engine)
    assert one.preemptions > 0
    assert spans(chunks) == [(0, 256)]


def test_what_the_pool_has_forgotten_is_exported_after_all():
    engine = make_engine(HistoryModel())
    chunks = exporting(engine)
    engine.add(request("p", random_prompt(4, 300), max_tokens=80, ignore_eos=True), held=288)
    engine.step()
    engine.export_from("p", 0)
    engine.export_from("gone", 0)
    while engine.has_work:
        engine.step()
    assert spans(chunks) == [(0, 256), (256, 352)]


def test_without_held_nothing_is_exported(model):
    assert exported(model, random_prompt(0, 300, 256), held=None, prefill_only=True) == []
