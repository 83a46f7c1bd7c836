"""Translations and summaries through a gateway: native bodies and answers, usage, errors."""

from __future__ import annotations

import json

from serve_app.tasks.predicting import MAX_WRITTEN, written_at_most
from serve_app.wire.predict import PredictCall, Predicted
from tests.tasks.conftest import ACCOUNT


async def turned(model, method, call: PredictCall) -> Predicted:
    """Writes each text backwards, with what it was asked for."""
    options = json.loads(call.options)
    said = [f"{data.decode()[::-1]} {sorted(map(str, options.values()))}" for data in call.inputs]
    return Predicted(tuple(json.dumps(text).encode() for text in said), {"input_tokens": 7, "output_tokens": 9})


async def test_translations(serve, record) -> None:
    model = record("translation", "predictor")
    run = f"{ACCOUNT}/run/{model}"
    async with serve(turned, models=(model,)) as served:
        one = await served.http.post(run, json={"text": "abc", "target_lang": "fr"})
        assert one.json()["result"] == {"translated_text": "cba ['en', 'fr']"}
        many = await served.http.post(run, json={"text": ["ab", "cd"], "source_lang": "de", "target_language": "hi"})
        assert many.json()["result"] == {"translations": ["ba ['de', 'hi']", "dc ['de', 'hi']"]}
        [first, _] = served.settled
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (7, 9)
        assert first.entry.units == {"input_tokens": 7, "cached_tokens": 0, "output_tokens": 9} and first.entry.neurons
        for body in (
            {}, {"text": "a"}, {"text": "", "target_lang": "fr"}, {"text": 5, "target_lang": "fr"},
            {"text": [], "target_lang": "fr"}, {"text": ["a", ""], "target_lang": "fr"},
            {"text": ["a"] * 101, "target_lang": "fr"}, {"text": "x" * 20_001, "target_lang": "fr"},
            {"text": "a", "target_lang": 7}, {"text": "a", "target_lang": "x" * 40},
        ):  # fmt: skip
            refused = await served.http.post(run, json=body)
            assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006, body
        assert len(served.settled) == 2


async def test_summaries(serve, record) -> None:
    model = record("summarization", "predictor")
    run = f"{ACCOUNT}/run/{model}"
    async with serve(turned, models=(model,)) as served:
        for body, wanted in (({"input_text": "abc"}, "None"), ({"input_text": "abc", "max_length": 5}, "5")):
            answer = await served.http.post(run, json=body)
            assert answer.json()["result"] == {"summary": f"cba ['{wanted}']"}
        assert served.settled[0].entry.units["output_tokens"] == 9
        for wrong in ({}, {"input_text": ""}, {"input_text": ["a"]}, {"input_text": "a", "max_length": 0},
                      {"input_text": "a", "max_length": 2000}, {"input_text": "x" * 200_001}):  # fmt: skip
            refused = await served.http.post(run, json=wrong)
            assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006


def test_what_texts_can_take_is_bounded() -> None:
    assert written_at_most(["abc", "é"]) == {"input_tokens": 3 + 2 + 16, "output_tokens": 2 * MAX_WRITTEN}
