"""Random checkpoints of several families through the worker: what transformers itself says of each input alone."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

from serve_app.wire.generate import Failed
from tests.media.files import bad_pictures, picture
from tests.media.hostile import hostile_pictures
from tests.predict.conftest import call, saved

TEXT = {
    "bert": (tf.BertConfig, tf.BertForSequenceClassification, {}),
    "distilbert": (tf.DistilBertConfig, tf.DistilBertForSequenceClassification,
                   {"n_layers": 2, "n_heads": 4, "dim": 32}),
    "roberta": (tf.RobertaConfig, tf.RobertaForSequenceClassification, {"pad_token_id": 1}),
    "electra": (tf.ElectraConfig, tf.ElectraForSequenceClassification, {"embedding_size": 16}),
}  # fmt: skip
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 3}


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
async def test_texts_are_classified_as_transformers_does(family, problem, work, tmp_path):
    config_class, model_class, more = TEXT[family]
    torch.manual_seed(1)
    fields = {"vocab_size": 99, "max_position_embeddings": 64, "problem_type": problem, **SMALL, **more}
    if family == "distilbert":
        fields.pop("hidden_size")
    model = model_class(config_class(**fields)).eval()
    worker = work("text-classification", saved(model, tmp_path / "model"))
    rng = np.random.default_rng(2)
    texts = [rng.integers(5, 99, n).astype(np.int32) for n in (3, 17, 40, 1, 22)]
    told = await asyncio.gather(*(worker.predict(call(text.tobytes())) for text in texts))
    assert worker.stats().numbers["batches"] < 6  # the warm-up's, and fewer than one for each
    for text, found in zip(texts, told, strict=True):
        logits = model(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
        wanted = logits.softmax(-1) if problem.startswith("single") else logits.sigmoid()
        [scores] = map(json.loads, found.results)
        assert [row["label"] for row in scores] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert [row["score"] for row in scores] == pytest.approx(wanted.tolist(), abs=2e-6)


PICTURES = {
    "resnet": (tf.ResNetConfig, tf.ResNetForImageClassification, "ConvNextImageProcessor",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
                "num_labels": 7}),
    "vit": (tf.ViTConfig, tf.ViTForImageClassification, "ViTImageProcessor",
            {**SMALL, "image_size": 48, "patch_size": 16, "num_labels": 7}),
    "convnext": (tf.ConvNextConfig, tf.ConvNextForImageClassification, "ConvNextImageProcessor",
                 {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 7}),
    "mobilenet": (tf.MobileNetV2Config, tf.MobileNetV2ForImageClassification, "ViTImageProcessor",
                  {"depth_multiplier": 0.25, "num_labels": 7}),
}  # fmt: skip


@pytest.mark.parametrize("family", PICTURES)
async def test_pictures_are_classified_as_transformers_does(family, work, tmp_path):
    config_class, model_class, processor_class, fields = PICTURES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**fields)).eval()
    folder = saved(model, tmp_path / "model", processor_class)
    if processor_class.startswith("ConvNext"):
        said = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps({**said, "size": {"shortest_edge": 48}}))
    worker = work("image-classification", folder)
    processor = tf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    files = [picture(40, 30), picture(100, 60, "JPEG"), picture(48, 48, "WEBP")]
    told = await asyncio.gather(*(worker.predict(call(file, top_k=3)) for file in files))
    for file, found in zip(files, told, strict=True):
        given = processor(images=Image.open(BytesIO(file)).convert("RGB"), return_tensors="pt")
        scores, places = model(**given).logits[0].softmax(-1).topk(3)
        [rows] = map(json.loads, found.results)
        assert found.units == {"images": 1}
        assert [row["label"] for row in rows] == [f"LABEL_{place}" for place in places.tolist()]
        assert [row["score"] for row in rows] == pytest.approx(scores.tolist(), abs=2e-6)


DETECTORS = {
    "yolos": (tf.YolosConfig, tf.YolosForObjectDetection, "YolosImageProcessor",
              {**SMALL, "image_size": [48, 48], "patch_size": 16, "num_detection_tokens": 5,
               "use_mid_position_embeddings": False}),
    "detr": (tf.DetrConfig, tf.DetrForObjectDetection, "DetrImageProcessor",
             {"use_timm_backbone": False, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_labels": 4,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
              "num_queries": 6}),
}  # fmt: skip


@pytest.mark.parametrize("family", DETECTORS)
async def test_things_are_found_as_transformers_does(family, work, tmp_path):
    config_class, model_class, processor_class, fields = DETECTORS[family]
    torch.manual_seed(3)
    if family == "detr":
        fields["backbone_config"] = tf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
    model = model_class(config_class(**fields)).eval()
    folder = saved(model, tmp_path / "model", processor_class)
    worker = work("object-detection", folder)
    processor = tf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    files = [picture(40, 30), picture(100, 60, "JPEG"), picture(64, 64)]
    told = await asyncio.gather(*(worker.predict(call(file, threshold=0.1 * n)) for n, file in enumerate(files)))
    total = 0
    for n, (file, found) in enumerate(zip(files, told, strict=True)):
        seen = Image.open(BytesIO(file)).convert("RGB")
        out = model(**processor(images=seen, return_tensors="pt"))
        sizes = torch.tensor([[seen.height, seen.width]])
        [wanted] = processor.post_process_object_detection(out, threshold=0.1 * n, target_sizes=sizes)
        [rows] = map(json.loads, found.results)
        total += len(rows)
        order = wanted["scores"].argsort(descending=True)
        assert [row["score"] for row in rows] == pytest.approx(wanted["scores"][order].tolist(), abs=1e-5)
        boxes = [[row["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for row in rows]
        assert np.abs(np.array(boxes) - wanted["boxes"][order].detach().numpy().astype(int)).max(initial=0) <= 1
    assert total > 5


async def test_bad_pictures_are_refused_and_good_ones_go_on(work, tmp_path):
    config_class, model_class, processor_class, fields = PICTURES["vit"]
    worker = work(
        "image-classification", saved(model_class(config_class(**fields)), tmp_path / "model", processor_class)
    )
    bad = [*bad_pictures().values(), *hostile_pictures().values()]
    files = [file for each in bad for file in (each, picture())]
    told = await asyncio.gather(*(worker.predict(call(file)) for file in files))
    for bad, good in zip(told[::2], told[1::2], strict=True):
        assert isinstance(bad, Failed) and bad.refused and bad.error.startswith("image: ")
        assert len(json.loads(good.results[0])) == 5
