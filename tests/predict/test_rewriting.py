"""Random encoder-decoder checkpoints through the worker: the texts that transformers' own generate writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from serve_app.wire.generate import Failed
from tests.predict.conftest import call
from tests.variants import some

SENTENCES = ("the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "a dog",
             "boxes of foxes", "how vexingly quick daft zebras jump", "jugs")  # fmt: skip


def m2m100(folder: Path, beams: int) -> tuple[tf.M2M100ForConditionalGeneration, tf.M2M100Tokenizer]:
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(SENTENCES * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "pieces"), vocab_size=44, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    names = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size()))]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    tokenizer = tf.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "pieces.model"))
    torch.manual_seed(4)
    config = tf.M2M100Config(
        vocab_size=160, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.4,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    model = tf.M2M100ForConditionalGeneration(config).eval()
    model.generation_config.update(max_length=24, num_beams=beams, early_stopping=beams > 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize("beams", some([1, 4], 4))
async def test_translations_are_transformers(work, tmp_path, beams):
    model, tokenizer = m2m100(tmp_path / "model", beams)
    worker = work("translation", tmp_path / "model")
    pairs = [("en", "fr"), ("de", "fr"), ("en", "zu"), ("English", "French"), ("en", "fr"), ("en", "fr")]
    told = await asyncio.gather(
        *(worker.predict(call(text.encode(), source=source, target=target))
          for text, (source, target) in zip(SENTENCES, pairs, strict=True))
    )  # fmt: skip
    written = set()
    for text, (source, target), found in zip(SENTENCES, pairs, told, strict=True):
        tokenizer.src_lang = {"English": "en"}.get(source, source)
        code = {"French": "fr"}.get(target, target)
        given = tokenizer(text, return_tensors="pt")
        out = model.generate(**given, forced_bos_token_id=tokenizer.get_lang_id(code))
        [said] = map(json.loads, found.results)
        # After the first token and the language, which a tokenizer that is read again may hold for text.
        assert said == tokenizer.decode(out[0, 2:], skip_special_tokens=True)
        assert found.units["input_tokens"] == given["input_ids"].shape[1] and found.units["output_tokens"] > 1
        written.add(said)
    assert len(written) > 2
    for options in ({"source": "xx", "target": "fr"}, {"source": "en", "target": "Klingon"}):
        refused = await worker.predict(call(b"a dog", **options))
        assert isinstance(refused, Failed) and "does not know the language" in refused.error
    long = await worker.predict(call(b"quick " * 200, source="en", target="fr"))
    assert isinstance(long, Failed) and "at most 64" in long.error


def bart(folder: Path) -> tuple[tf.BartForConditionalGeneration, tf.PreTrainedTokenizerFast]:
    words = sorted({word for text in SENTENCES for word in text.split()})
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{word: i for i, word in enumerate(words, 4)}}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(6)
    config = tf.BartConfig(
        vocab_size=len(vocab), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.4,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = tf.BartForConditionalGeneration(config).eval()
    searched = {"max_length": 30, "min_length": 12, "num_beams": 4, "no_repeat_ngram_size": 3, "length_penalty": 2.0}
    model.generation_config.update(**searched)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.slow
async def test_summaries_are_transformers(work, tmp_path):
    model, tokenizer = bart(tmp_path / "model")
    worker = work("summarization", tmp_path / "model")
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(SENTENCES, n)) for n in (1, 2, 3, 2)]
    for length in (None, 8):
        told = await asyncio.gather(*(worker.predict(call(text.encode(), max_length=length)) for text in texts))
        for text, found in zip(texts, told, strict=True):
            given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            bound = {} if length is None else {"max_length": length, "min_length": length}
            out = model.generate(**given, **bound)
            assert json.loads(found.results[0]) == tokenizer.decode(out[0], skip_special_tokens=True)
            assert found.units == {"input_tokens": given["input_ids"].shape[1], "output_tokens": out.shape[1]}
