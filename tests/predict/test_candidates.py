"""Classes that a client names, of random checkpoints: what transformers' own zero-shot pipelines say of them."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from serve_app.tasks.text_classification.task import scored
from serve_app.wire.generate import Failed
from tests.media.files import picture
from tests.predict.conftest import call, saved
from tests.predict.pipelines import clip_tokenizer
from tests.predict.test_small_tasks import PICTURES, SMALL, TEXT
from tests.variants import some

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "i", "like", "this", "example", "is", ".", "tea", "sport", "politics",
         "and", "more", "of", "it"]  # fmt: skip
LABELS = ["tea", "sport and politics", "politics", "more of it"]
TOWERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def words(folder: Path, *, types: bool = True) -> tf.PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = ["input_ids", *["token_type_ids"] * types, "attention_mask"]
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=names,
    )  # fmt: skip
    made.save_pretrained(folder)
    return made


NAMES = {
    "yes last": {0: "contradiction", 1: "neutral", 2: "ENTAILMENT"},
    "yes first": {0: "entailment", 1: "not_entailment"},
}
READERS = {
    **{name: family for name, family in TEXT.items() if name != "electra"},
    "bart": (tf.BartConfig, tf.BartForSequenceClassification,
             {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}),
}  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", some(READERS, "bert", "bart"))
async def test_what_follows_from_a_text_is_scored_as_transformers_does(family, names, work, tmp_path):
    config_class, model_class, more = READERS[family]
    torch.manual_seed(5)
    fields = {"vocab_size": 99, "max_position_embeddings": 64, **SMALL, **more, "id2label": NAMES[names]}
    fields["label2id"] = {name: number for number, name in NAMES[names].items()}
    fields.pop("num_labels")
    if family in ("distilbert", "bart"):
        fields.pop("hidden_size")
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for head in [part for part in model.modules() if isinstance(part, torch.nn.Linear)]:
            head.weight *= 8  # or all sentences have about the same score
    folder = saved(model, tmp_path / "model")
    tokenizer = words(folder, types=family == "bert")
    worker = work("text-classification", folder)
    theirs = tf.pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    for text in ("i like tea and more of this .", "politics"):
        pairs = [tokenizer(text, f"This example is {label}.") for label in LABELS]
        types = [pair.get("token_type_ids", [0] * len(pair["input_ids"])) for pair in pairs]
        inputs = [
            torch.tensor([*pair["input_ids"], *kinds], dtype=torch.int32).numpy().tobytes()
            for pair, kinds in zip(pairs, types, strict=True)
        ]
        found = [json.loads(result) for result in (await worker.predict(call(*inputs, follows=True))).results]
        for alone in (False, True):
            ours, wanted = scored(LABELS, found, alone=alone), theirs(text, LABELS, multi_label=alone)
            assert [one["label"] for one in ours] == wanted["labels"]
            assert [one["score"] for one in ours] == pytest.approx(wanted["scores"], abs=2e-6)
        [only] = scored(LABELS[:1], found[:1], alone=False)
        assert only["score"] == pytest.approx(theirs(text, LABELS[:1])["scores"][0], abs=2e-6)


async def test_a_model_with_other_classes_refuses_those_that_are_named(work, tmp_path):
    config_class, model_class, _ = TEXT["bert"]
    folder = saved(model_class(config_class(vocab_size=99, **SMALL)), tmp_path / "model")
    told = await work("text-classification", folder).predict(call(b"\1\0\0\0\0\0\0\0", follows=True))
    assert isinstance(told, Failed) and told.refused and "LABEL_0, LABEL_1, LABEL_2 and nothing else" in told.error


BOTH = {
    "clip": (tf.CLIPConfig, tf.CLIPModel, "CLIPImageProcessor", 53),
    "siglip": (tf.SiglipConfig, tf.SiglipModel, "SiglipImageProcessor", 1),
    "chinese_clip": (tf.ChineseCLIPConfig, tf.ChineseCLIPModel, "ChineseCLIPImageProcessor", 0),
}


def seeing(family: str, folder: Path) -> tuple[Path, object, object]:
    config_class, model_class, processor, end = BOTH[family]
    torch.manual_seed(7)
    text = {"vocab_size": 99, "max_position_embeddings": 64 if family == "siglip" else 16, **TOWERS}
    if family == "clip":
        text |= {"eos_token_id": end, "bos_token_id": 52, "pad_token_id": end}
    sides = {} if family == "siglip" else {"projection_dim": 24}
    vision = {"image_size": 48, "patch_size": 16, **TOWERS}
    model = model_class(config_class(text_config=text, vision_config=vision, **sides)).eval()
    if family == "chinese_clip":
        tokenizer = words(folder, types=False)
    else:
        tokenizer = clip_tokenizer(folder)
        if family == "siglip":
            tokenizer.model_max_length = 64
    saved(model, folder, processor)
    tokenizer.save_pretrained(folder)
    said = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**said, "do_center_crop": False}))
    if family == "siglip":
        said = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**said, "model_input_names": ["input_ids"]}))
    return folder, model, tf.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", BOTH)
async def test_pictures_are_scored_beside_texts_as_transformers_does(family, work, tmp_path):
    folder, model, tokenizer = seeing(family, tmp_path / "model")
    worker = work("image-classification", folder)
    processor = tf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    theirs = tf.pipeline("zero-shot-image-classification", model=model, tokenizer=tokenizer, image_processor=processor)
    files = [picture(40, 30), picture(100, 60, "JPEG"), picture(48, 48, "WEBP")]
    named = [["tea", "a cat"], ["politics", "tea", "of it"], ["a cat"]]
    sentences = [[f"a {label}" for label in labels] for labels in named]
    asked = list(zip(files, named, sentences, strict=True)) * 2
    told = await asyncio.gather(
        *(worker.predict(call(f, candidate_labels=labels, sentences=texts)) for f, labels, texts in asked)
    )
    for (file, labels, _), found in zip(asked, told, strict=True):
        wanted = theirs(Image.open(BytesIO(file)).convert("RGB"), candidate_labels=labels, hypothesis_template="a {}")
        [rows] = map(json.loads, found.results)
        assert {row["label"]: row["score"] for row in rows} == pytest.approx(
            {row["label"]: row["score"] for row in wanted}, abs=2e-6
        )
        assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)


async def test_what_a_model_of_pictures_cannot_do_is_said(work, tmp_path):
    folder, _, _ = seeing("clip", tmp_path / "model")
    beside = work("image-classification", folder)
    config_class, model_class, processor, fields = PICTURES["vit"]
    own = work("image-classification", saved(model_class(config_class(**fields)), tmp_path / "own", processor))
    long = "a very long name of something " * 3
    for worker, options, why in (
        (beside, {}, "no classes of its own"),
        (beside, {"candidate_labels": [long], "sentences": [long]}, "candidate_labels[0] has "),
        (own, {"candidate_labels": ["a"], "sentences": ["a"]}, "its own 7 classes and no others"),
    ):
        told = await worker.predict(call(picture(), **options))
        assert isinstance(told, Failed) and told.refused and why in told.error
