"""Classes that a client names, through a gateway: transformers' scores, tokens that are counted, what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from serve_app.api.errors import InvalidInput
from serve_app.tasks.image_classification.task import parse_classify
from serve_app.tasks.task import Body
from serve_app.tasks.text_classification.task import parse_text
from serve_app.wire.predict import PredictCall, PredictResult
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from tests.predict.test_candidates import LABELS, NAMES, words
from tests.predict.test_small_tasks import SMALL
from tests.tasks.conftest import ACCOUNT

TEXT = "i like tea and more of this ."


async def test_a_text_is_scored_beside_the_classes_that_are_named(serve, record, tmp_path) -> None:
    model_id, folder = record("text-classification", "predictor"), tmp_path / "models" / "weights"
    torch.manual_seed(5)
    names = {"id2label": NAMES["yes last"], "label2id": {name: i for i, name in NAMES["yes last"].items()}}
    sizes = {name: size for name, size in SMALL.items() if name != "num_labels"}
    model = tf.BertForSequenceClassification(tf.BertConfig(vocab_size=99, **sizes, **names)).eval()
    model.save_pretrained(folder)
    tokenizer = words(folder)
    spec = WorkerSpec(model_id, "predictor", {"path": str(folder)}, "", str(tmp_path), task="text-classification",
                      dtype="float32", cpu_threads=1)  # fmt: skip
    worker = PredictWork(spec, lambda step: None)

    async def call(_, __, wire: PredictCall) -> PredictResult:
        return await worker.predict(wire)

    theirs = tf.pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    async with serve(call, models=(model_id,)) as served:
        for alone, template in ((False, "This example is {}."), (True, "politics and {}")):
            named = {"candidate_labels": LABELS, "hypothesis_template": template, "multi_label": alone}
            answer = await served.http.post(f"{ACCOUNT}/run/{model_id}", json={"text": TEXT, **named})
            assert answer.status_code == 200, answer.text
            rows = answer.json()["result"]
            wanted = theirs(TEXT, LABELS, hypothesis_template=template, multi_label=alone)
            assert [row["label"] for row in rows] == wanted["labels"]
            assert [row["score"] for row in rows] == pytest.approx(wanted["scores"], abs=2e-6)
            read = sum(len(tokenizer(TEXT, template.format(label))["input_ids"]) for label in LABELS)
            assert served.settled[-1].usage.prompt_tokens == read
        told = await served.http.post(f"{ACCOUNT}/estimate/{model_id}", json={"text": TEXT, **named})
        assert told.json()["result"]["prompt_tokens"] == read
        # Without names it has classes of its own.
        own = (await served.http.post(f"{ACCOUNT}/run/{model_id}", json={"text": TEXT})).json()["result"]
        assert [row["label"] for row in own] == list(NAMES["yes last"].values())
    torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"candidate_labels": []}, "an array of 1 to 64 strings"),
        ({"candidate_labels": "tea"}, "an array of 1 to 64 strings"),
        ({"candidate_labels": ["a"] * 65}, "an array of 1 to 64 strings"),
        ({"candidate_labels": ["a", 5]}, "candidate_labels[1] must be a string"),
        ({"candidate_labels": ["a", " "]}, "candidate_labels[1] must not be empty"),
        ({"candidate_labels": ["a", "b", "a"]}, "candidate_labels[2] is there twice"),
        ({"candidate_labels": ["a" * 501]}, "candidate_labels[0] must have at most 500 characters"),
        ({"candidate_labels": ["a"], "hypothesis_template": "about"}, "must have {} where the label belongs"),
        ({"hypothesis_template": "about {}"}, "candidate_labels, which are missing"),
    ],
)
def test_what_is_no_list_of_classes_is_refused(fields, why) -> None:
    for read, body in ((parse_text, {"text": "x"}), (lambda b: parse_classify(Body(json=b)), {"image": [1]})):
        with pytest.raises(InvalidInput) as refused:
            read({**body, **fields})
        assert why in str(refused.value)


def test_several_may_be_right_only_where_some_are_named() -> None:
    with pytest.raises(InvalidInput, match="multi_label is for candidate_labels"):
        parse_text({"text": "x", "multi_label": True})
    assert parse_text({"text": "x", "multi_label": False}).candidates is None
