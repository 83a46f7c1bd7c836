"""One question, answered by the engine with the small model that comes with the project: ``python -m tests.one_answer``
prints the tokens as JSON. For another interpreter to run, so it needs neither Ray nor what tests install.
"""

from __future__ import annotations

import json

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.models.load import load_causal_lm
from serve_app.sampling_params import SamplingParams
from serve_app.text.tokenizer import Tokenizer

MODEL = PROJECT_ROOT / "checkpoints" / "pico-instruct"
QUESTION = "What does itertools.chain do?"


def answer() -> list[int]:
    """Greedy tokens, the end included."""
    tokenizer = Tokenizer(MODEL)
    template = tokenizer.chat_template()
    assert template is not None
    prompt = tokenizer.encode_prompt(template.render([{"role": "user", "content": QUESTION}])).tolist()
    engine = build_engine(load_causal_lm(MODEL), EngineLimits(max_model_len=1024))
    engine.add(Request("1", prompt, len(prompt), SamplingParams(temperature=0.0, max_tokens=128), root=b"one answer"))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


if __name__ == "__main__":
    print(json.dumps(answer()))
