"""Small tasks through a gateway, with the shipped models in this process: native bodies and answers, usage, errors."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from itertools import permutations
from random import Random

import pytest
import torch
import transformers as tf

from serve_app.catalog.load import PROJECT_ROOT, load_catalog
from serve_app.wire.predict import PredictCall, PredictResult
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from tests.media.files import bad_pictures, picture
from tests.tasks.conftest import ACCOUNT
from training.hearing.commands import is_held_out
from training.rewriting.reports import make as make_report
from training.rewriting.sentences import LANGUAGES
from training.rewriting.sentences import make as make_sentence
from training.scenes import SHAPES, draw, draw_one

SENTIMENT, SHAPE, DETECTOR = "@cf/pico/pico-sentiment", "@cf/pico/pico-shapes", "@cf/pico/pico-detector"
SUMMARY, TRANSLATOR, HEARING = "@cf/pico/pico-summary", "@cf/pico/pico-translator", "@cf/pico/pico-hearing"
SPEAKER = "@cf/pico/pico-speaker"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory):
    """The worker of each shipped model, when it is first called."""
    catalog, made = load_catalog(), {}
    home = str(tmp_path_factory.mktemp("home"))
    threads = torch.get_num_threads()

    async def call(model, method, wire: PredictCall) -> PredictResult:
        assert method.name == "predict"
        if model.id not in made:
            record = catalog[model.id]
            spec = WorkerSpec(model.id, "predictor", record.weights.model_dump(), str(catalog.source(model.id)), home,
                              task=record.task, dtype=record.dtype, cpu_threads=1)  # fmt: skip
            made[model.id] = PredictWork(spec, lambda step: None)
        return await made[model.id].predict(wire)

    yield call
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def png(image) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


async def test_a_text_has_a_score_for_each_label(serve, workers) -> None:
    async with serve(workers, models=(SENTIMENT,)) as served:
        for text, label in (("What a wonderful evening!", "POSITIVE"), ("The soup was cold and bland.", "NEGATIVE")):
            answer = (await served.http.post(f"{ACCOUNT}/run/{SENTIMENT}", json={"text": text})).json()
            assert answer["success"] and [row["label"] for row in answer["result"]] == ["NEGATIVE", "POSITIVE"]
            scores = {row["label"]: row["score"] for row in answer["result"]}
            assert scores[label] > 0.9 and sum(scores.values()) == pytest.approx(1.0)
        [first, _] = served.settled
        assert first.entry.units["input_tokens"] == first.usage.prompt_tokens > 4 and first.entry.neurons > 0
        asked = {"text": "x", "options": {"estimate": True}}
        told = (await served.http.post(f"{ACCOUNT}/run/{SENTIMENT}", json=asked)).json()["result"]
        assert told["prompt_tokens"] == 3
        for body, code in (({}, 5006), ({"text": ""}, 5006), ({"text": 5}, 5006), ({"text": "word " * 900}, 5021)):
            refused = await served.http.post(f"{ACCOUNT}/run/{SENTIMENT}", json=body)
            assert refused.json()["errors"][0]["code"] == code, refused.text


async def test_a_picture_comes_in_four_shapes(serve, workers) -> None:
    image, shape = draw_one(Random(3))
    file = png(image)
    coded = base64.b64encode(file).decode()
    run = f"{ACCOUNT}/run/{SHAPE}"
    async with serve(workers, models=(SHAPE,)) as served:
        answers = [
            await served.http.post(run, content=file),
            await served.http.post(run, content=file, headers={"Content-Type": "image/png"}),
            await served.http.post(run, json={"image": list(file)}),
            await served.http.post(run, json={"image": coded}),
            await served.http.post(run, json={"image": f"data:image/png;base64,{coded}"}),
        ]
        found = [answer.json()["result"] for answer in answers]
        assert all(one == found[0] for one in found) and len(found[0]) == 5
        assert found[0][0]["label"] == SHAPES[shape] and found[0][0]["score"] > found[0][1]["score"]
        assert all(settled.entry.units["images"] == 1 for settled in served.settled) and len(served.settled) == 5
        few = (await served.http.post(run, json={"image": coded, "top_k": 2})).json()["result"]
        assert few == found[0][:2]
        told = (await served.http.post(run, json={"image": coded, "options": {"estimate": True}})).json()["result"]
        assert told["units"]["most"] == {"images": 1} and told["neurons"]["most"] > 0


async def test_things_are_found_where_they_are(serve, workers) -> None:
    async with serve(workers, models=(DETECTOR,)) as served:
        right = total = 0
        for seed in range(10):
            image, things = draw(Random(f"detect {seed}"), 3)
            # As large as the client has it: boxes are in its pixels.
            large = image.resize((256, 256))
            answer = await served.http.post(f"{ACCOUNT}/run/{DETECTOR}", content=png(large))
            found = answer.json()["result"]
            for thing in things:
                total += 1
                right += any(
                    one["label"] == SHAPES[thing.shape] and _iou(one["box"], [4 * v for v in thing.box]) > 0.5
                    for one in found
                )
        assert right >= total * 0.8, f"{right} of {total}"
        none = await served.http.post(f"{ACCOUNT}/run/{DETECTOR}", json={"image": list(png(large)), "threshold": 1})
        assert none.json()["result"] == []


def _iou(box: dict, other: list[float]) -> float:
    across = min(box["xmax"], other[2]) - max(box["xmin"], other[0])
    down = min(box["ymax"], other[3]) - max(box["ymin"], other[1])
    inner = max(0, across) * max(0, down)
    areas = (box["xmax"] - box["xmin"]) * (box["ymax"] - box["ymin"]) + (other[2] - other[0]) * (other[3] - other[1])
    return inner / (areas - inner)


WRONG = [
    {}, {"image": None}, {"image": 7}, {"image": []}, {"image": ""}, {"image": [256]}, {"image": [-1]},
    {"image": ["a"]}, {"image": [1.5]}, {"image": [None]}, {"image": "https://example.com/a.png"}, {"image": "%%%"},
    {"image": "data:image/png,abc"}, {"image": {}}, {"image": [1, 2, 3], "top_k": 0},
    {"image": [1, 2, 3], "top_k": "5"},
]  # fmt: skip


async def test_bad_files_and_bodies_are_refused(serve, workers) -> None:
    run = f"{ACCOUNT}/run/{SHAPE}"
    async with serve(workers, models=(SHAPE,), max_media_body_bytes=1 << 20) as served:
        for body in WRONG:
            refused = await served.http.post(run, json=body)
            assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006, (body, refused.text)
        for name, data in bad_pictures().items():
            refused = await served.http.post(run, content=data, headers={"Content-Type": "image/png"})
            said = refused.json()["errors"][0]
            assert refused.status_code == 400 and said["code"] == 5006 and len(said["message"]) > 20, name
        assert {settled.status for settled in served.settled} == {"failed"}
        assert all(settled.entry is None for settled in served.settled)
        assert (await served.http.post(run, content=b"")).json()["errors"][0]["code"] == 3003
        large = await served.http.post(run, content=bytes((1 << 20) + 1))
        assert large.status_code == 413 and large.json()["errors"][0]["code"] == 3006
        assert (await served.http.post(run, content=picture())).status_code == 200


async def test_reports_are_summed_up_as_transformers_does(serve, workers) -> None:
    report, summary = make_report(Random("served"), held_out=True)
    texts = [report, "Nothing that it has ever read."]
    folder = PROJECT_ROOT / "checkpoints" / "pico-summary"
    async with serve(workers, models=(SUMMARY,)) as served:
        answers = [
            (await served.http.post(f"{ACCOUNT}/run/{SUMMARY}", json={"input_text": text})).json()["result"]["summary"]
            for text in texts
        ]
        assert answers[0] == summary
        words, model = tf.AutoTokenizer.from_pretrained(folder), tf.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        for text, answer, settled in zip(texts, answers, served.settled, strict=True):
            given = words(text, return_tensors="pt", return_token_type_ids=False)
            [ids] = model.generate(**given)
            assert answer == words.decode(ids, skip_special_tokens=True).strip()
            assert settled.entry.units["input_tokens"] == given["input_ids"].shape[1] and settled.entry.neurons > 0
        cut = await served.http.post(f"{ACCOUNT}/run/{SUMMARY}", json={"input_text": texts[0], "max_length": 5})
        assert (
            answers[0].startswith(cut.json()["result"]["summary"]) and served.settled[-1].usage.completion_tokens == 5
        )
        long = await served.http.post(f"{ACCOUNT}/run/{SUMMARY}", json={"input_text": "word " * 900})
        assert long.status_code == 400 and long.json()["errors"][0]["code"] in (5006, 5021)


async def test_travellers_are_understood_in_three_languages(serve, workers) -> None:
    said = make_sentence(Random("served"), held_out=True)
    folder = PROJECT_ROOT / "checkpoints" / "pico-translator"
    words, model = tf.M2M100Tokenizer.from_pretrained(folder), tf.M2M100ForConditionalGeneration.from_pretrained(folder)
    async with serve(workers, models=(TRANSLATOR,)) as served:
        for (source, text), (target, wanted) in permutations(zip(LANGUAGES, said, strict=True), 2):
            body = {"text": text, "source_lang": source, "target_lang": target}
            answer = (await served.http.post(f"{ACCOUNT}/run/{TRANSLATOR}", json=body)).json()["result"]
            words.src_lang = source
            given = words(text, return_tensors="pt")
            [ids] = model.eval().generate(**given, forced_bos_token_id=words.get_lang_id(target))
            assert answer["translated_text"] == words.decode(ids[2:], skip_special_tokens=True) == wanted
            assert served.settled[-1].entry.units["input_tokens"] == given["input_ids"].shape[1]


async def test_a_spoken_command_is_written_down(serve, workers) -> None:
    """By a voice that the model has not been trained with."""
    sound = (PROJECT_ROOT / "checkpoints" / "pico-hearing" / "example.wav").read_bytes()
    async with serve(workers, models=(HEARING,)) as served:
        answer = (await served.http.post(f"{ACCOUNT}/run/{HEARING}", content=sound)).json()["result"]
        assert answer["text"].strip() == "Turn off the radio in the kitchen."
        assert answer["word_count"] == 7 and answer["vtt"].startswith("WEBVTT")
        form = {"model": HEARING, "response_format": "verbose_json"}
        spoken = await served.http.post("/v1/audio/transcriptions", data=form, files={"file": ("talk.wav", sound)})
        [segment] = spoken.json()["segments"]
        assert spoken.json()["text"] == answer["text"]
        assert 0 <= segment["start"] < 0.3 and segment["end"] == pytest.approx(spoken.json()["duration"], abs=0.3)


async def test_what_is_said_is_understood(serve, workers) -> None:
    """A command that neither model has been trained with, from text to sound and back."""
    told = "Turn on the lamp in the bathroom."
    assert is_held_out(told)
    async with serve(workers, models=(SPEAKER, HEARING)) as served:
        body = {"model": SPEAKER, "input": told, "response_format": "wav"}
        sound = (await served.http.post("/v1/audio/speech", json=body)).content
        heard = (await served.http.post(f"{ACCOUNT}/run/{HEARING}", content=sound)).json()["result"]
        assert heard["text"].strip() == told
        # Letters are small to it, what it has no letter for is left out, and there is nothing to choose.
        for same in ({"input": f"*{told.upper()}*"}, {"seed": 7}):
            assert (await served.http.post("/v1/audio/speech", json={**body, **same})).content == sound
        digits = await served.http.post("/v1/audio/speech", json={**body, "input": "Set a timer for 7 minutes."})
        heard = (await served.http.post(f"{ACCOUNT}/run/{HEARING}", content=digits.content)).json()["result"]
        assert heard["text"].strip() == "Set a timer for seven minutes."
        refused = await served.http.post("/v1/audio/speech", json={**body, "input": "Привет"})
        assert refused.status_code == 400 and "characters that this model can say" in refused.text


def test_shipped_models_say_how_they_were_made() -> None:
    for name in ("sentiment", "shapes", "detector", "summary", "translator", "hearing", "vision"):
        folder = PROJECT_ROOT / "checkpoints" / f"pico-{name}"
        card = " ".join((folder / "README.md").read_text().split())
        assert "## Data" in card and "## Training" in card and "## Score" in card and "python -m training." in card
        assert sum(file.stat().st_size for file in folder.iterdir()) < 3 << 20
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
