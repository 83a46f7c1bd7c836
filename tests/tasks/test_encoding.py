"""Texts to encode: refused by their bytes before they are tokenised, and tokenised in slices off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_settle import EMBED, RERANK, encoded

HUGE = "word " * 600_000


def body(model: str, texts: list[str]) -> dict[str, Any]:
    return {"text": texts} if model == EMBED else {"query": "q", "contexts": [{"text": text} for text in texts]}


class Counted:
    """A tokenizer's method that counts its texts and whether the event loop ran meanwhile."""

    def __init__(self, tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inner = getattr(tokenizer, name)
        self.slices: list[int] = []
        self.threads: set[bool] = set()
        monkeypatch.setattr(tokenizer, name, self)

    def __call__(self, texts: list[Any], **options: Any) -> Any:
        self.slices.append(len(texts))
        try:
            asyncio.get_running_loop()
            self.threads.add(False)
        except RuntimeError:
            self.threads.add(True)
        return self._inner(texts, **options)


@pytest.mark.parametrize(("model", "method"), [(EMBED, "encode_batch"), (RERANK, "encode_pairs")])
async def test_long_texts_are_refused_early_and_many_are_tokenised_in_slices(serve, monkeypatch, model, method):
    async with serve(encoded) as served:
        counted = Counted(served.gateway.models.find(model).tokenizer, method, monkeypatch)

        async def ask(texts: list[str]) -> tuple[int, str]:
            answer = await served.http.post(f"{ACCOUNT}/run/{model}", json=body(model, texts))
            return answer.status_code, str(answer.json()["errors"])

        status, said = await ask(["short", HUGE])
        assert status == 413 and "5021" in said and "Input 1 has " in said and "bytes" in said
        assert counted.slices == []
        # 5 MB in texts that could be short enough: the first slice tells that they are not.
        status, said = await ask(["word " * 5_000] * 200)
        assert status == 413 and "Input 0 has " in said and "tokens" in said
        assert counted.slices == [1] and counted.threads == {True}
        counted.slices.clear()
        status, said = await ask(["word " * 200] * 100)
        assert status == 200
        assert len(counted.slices) > 1 and sum(counted.slices) == 100 and counted.threads == {True}
        counted.threads.clear()
        assert (await ask(["a few words"]))[0] == 200 and counted.threads == {False}
