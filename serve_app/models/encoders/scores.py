"""How a reranker's score is read off its hidden states: by a head on the first or the last token, or by an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from serve_app.models.loading.folder import UnsupportedModel


def base_of(module: Any) -> Any:
    """The model without its head."""
    return getattr(module, getattr(module, "base_model_prefix", ""), module)


def score_by_answer(module: Any, path: Path) -> None:
    """Makes a causal model a reranker that answers "yes" or "no", as Qwen3-Reranker does: the score is the difference
    of the two logits behind the last token, whose sigmoid is the probability of "yes" among them."""
    file = path / "tokenizer.json"
    vocabulary = json.loads(file.read_text())["model"]["vocab"] if file.is_file() else {}
    if isinstance(vocabulary, list):
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    if "yes" not in vocabulary or "no" not in vocabulary:
        raise UnsupportedModel(
            f'{path} is a causal model whose tokenizer.json has no tokens "yes" and "no" to score by'
        )
    added = {token.get("content") for token in json.loads(file.read_text()).get("added_tokens") or ()}
    if not {"<|im_start|>", "<|im_end|>"} <= added:
        raise UnsupportedModel(
            f"{path} is a causal model that is not asked as Qwen3-Reranker is (its tokenizer has no <|im_start|>); no "
            "other prompt is known"
        )
    head = module.get_output_embeddings()
    rows = [head.weight[vocabulary[word]].float() for word in ("yes", "no")]
    score = nn.Linear(head.in_features, 1, bias=False)
    score.weight = nn.Parameter((rows[0] - rows[1])[None].to(head.weight.dtype), requires_grad=False)
    module.score = score.to(head.weight.device)


def scored_last(module: Any) -> bool:
    """Whether the score is read off a text's last token, as decoders have it."""
    return hasattr(module, "score") and not hasattr(module, "classifier")


def classify(module: Any, hidden: Tensor, sizes: Tensor) -> Tensor:
    """The classification head on hidden states [T, H] of sequences of ``sizes`` tokens -> logits [R, 1]."""
    ends = sizes.cumsum(0)
    if scored_last(module):
        return module.score(hidden[ends - 1])
    rows = hidden[ends - sizes].unsqueeze(1)  # heads index token 0 themselves
    pooler = getattr(base_of(module), "pooler", None)
    return module.classifier(pooler(rows) if pooler is not None else rows)
