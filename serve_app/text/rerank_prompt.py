"""What a causal model that reranks is asked: Qwen3-Reranker's prompt, whose answer is "yes" or "no".

The format is the one published with the models (huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from serve_app.api.types import Shorten
from serve_app.text.shorten import kept_tokens
from serve_app.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}\n<Query>: "
_BETWEEN = "\n<Document>: "
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
# Of each part the number of the text in it, as `kept_tokens` counts them.
_TEXTS = (-1, 0, -1, 1, -1)


def answers_pairs(folder: Path) -> bool:
    """Whether the model in ``folder`` is a causal one, which scores a pair by its answer."""
    file = folder / "config.json"
    named = json.loads(file.read_text("utf-8")).get("architectures") if file.is_file() else None
    return any(str(name).endswith("ForCausalLM") for name in named or ())


def encode_questions(
    pairs: list[tuple[str, str]], *, tokenizer: Tokenizer, shorten: Shorten | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, token type ids of 0), both int32 [tokens], of the prompt for each pair of query and document, each
    text cut as ``shorten`` says. Control tokens that a text spells stay text."""
    control = tokenizer.control
    parts = [
        part
        for query, document in pairs
        for part in (_BEFORE, control.neutralise(query), _BETWEEN, control.neutralise(document), _BEHIND)
    ]
    backend, safe = control.reader(parts)
    prompts = [safe[at : at + len(_TEXTS)] for at in range(0, len(safe), len(_TEXTS))]
    found = []
    for prompt, encoding in zip(
        prompts, backend.encode_batch(["".join(prompt) for prompt in prompts], add_special_tokens=False), strict=True
    ):
        ids = np.asarray(encoding.ids, np.int32)
        if shorten is not None:
            ends = np.cumsum([len(part) for part in prompt])
            begins = np.array([begin for begin, _ in encoding.offsets])
            part_of = np.minimum(np.searchsorted(ends, begins, side="right"), len(_TEXTS) - 1)
            ids = ids[kept_tokens(np.array(_TEXTS, np.int32)[part_of], shorten)]
        found.append((ids, np.zeros(len(ids), np.int32)))
    return found
