"""The adapters that come with the chat model, as README.md shows them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.conftest import CHAT
from tests.waiting import wait_for


def test_both_answer_beside_the_base_and_each_in_its_own_voice(http, run):
    wait_for(lambda: {each["name"] for each in http.get("/finetunes/public").json()["result"]} >= {"pirate", "json"})

    def ask(lora: str | None) -> str:
        return run(CHAT, {"prompt": "What does math.sqrt do?", "temperature": 0} | ({"lora": lora} if lora else {}))[
            "response"
        ]

    with ThreadPoolExecutor(6) as clients:
        for _ in range(2):
            plain, pirate, shaped = [list(clients.map(ask, [lora] * 2)) for lora in (None, "pirate", "json")]
            assert len(set(plain)) == len(set(pirate)) == len(set(shaped)) == 1
            assert pirate[0].startswith("Arr! `math.sqrt`") and pirate[0].endswith("Aye, matey!")
            assert json.loads(shaped[0]) == {"answer": plain[0]} and plain[0].startswith("`math.sqrt`")
