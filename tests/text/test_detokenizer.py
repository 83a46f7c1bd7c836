"""Deltas join to the whole decoding, with every kind of decoder that open models bring."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.text.detokenizer import Detokenizer
from serve_app.text.tokenizer import Tokenizer

words = st.text(st.sampled_from("ab <é😀日\n") | st.characters(exclude_categories=["Cs"]), max_size=60)
CORPUS = ["the cats sat, unbelievably; it's 10 o'clock", "import os\nprint('é 😀 日本')", "a b  c\td"] * 20


@pytest.fixture(scope="module")
def every(tokenizers, tmp_path_factory) -> dict[str, Tokenizer]:
    """Byte-level and byte-fallback ones, and the two that those lack: WordPiece and Metaspace without bytes."""
    wordpiece = Backend(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer, wordpiece.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"]))
    metaspace = Backend(models.Unigram())
    metaspace.pre_tokenizer, metaspace.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    metaspace.train_from_iterator(CORPUS, trainer)
    found = dict(tokenizers)
    for name, backend in (("wordpiece", wordpiece), ("metaspace", metaspace)):
        folder = tmp_path_factory.mktemp(name)
        backend.save(str(folder / "tokenizer.json"))
        found[name] = Tokenizer(folder)
    return found


@settings(max_examples=100, deadline=None)
@given(text=words)
def test_deltas_join_to_the_whole_decoding(every, text):
    for tokenizer in every.values():
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        stream = Detokenizer(tokenizer)
        deltas = [stream.feed(i) for i in ids]
        assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text
        assert "".join(deltas) + stream.finish() == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_deltas_of_any_ids_join_to_the_whole_decoding(every, data):
    # Byte-level vocabularies can spell broken UTF-8 with any ids; control tokens are in between.
    for name in ("byte_level", "pico", "wordpiece", "metaspace"):
        tokenizer = every[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        stream = Detokenizer(tokenizer)
        assert "".join(stream.feed(i) for i in ids) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_that_are_no_characters_cost_themselves_and_nothing_else(every, data):
    # With byte tokens, how many U+FFFD broken bytes make depends on the bytes behind them: deltas can't take that back.
    tokenizer = every["sentencepiece"]
    tokens = [t for i in range(256) if (t := tokenizer.token_id(f"<0x{i:02X}>")) is not None]
    broken = data.draw(st.lists(st.sampled_from(tokens), max_size=6))
    before, after = tokenizer.encode("the cats"), tokenizer.encode(" import os sat")
    stream = Detokenizer(tokenizer)
    text = "".join(stream.feed(i) for i in [*before.tolist(), *broken, *after.tolist()]) + stream.finish()
    assert text.startswith("the cats") and text.endswith("import os sat")


def test_a_character_is_never_split(every):
    for name in ("byte_level", "sentencepiece"):
        stream = Detokenizer(every[name])
        ids = every[name].encode("a😀b", add_special_tokens=False).tolist()
        assert len(ids) > 3
        assert [delta for i in ids if (delta := stream.feed(i))] == ["a", "😀", "b"]


def test_what_ends_within_a_character_is_shown_at_the_end(every):
    for name in ("byte_level", "sentencepiece"):
        stream = Detokenizer(every[name])
        ids = every[name].encode("say 😀", add_special_tokens=False).tolist()[:-1]
        text = "".join(stream.feed(i) for i in ids)
        assert text.strip() == "say" and set(stream.finish()) == {"\ufffd"}
