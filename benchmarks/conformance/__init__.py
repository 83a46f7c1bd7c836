"""What the published APIs promise, asked of a running server over HTTP; any server of these APIs can be asked.

    python -m benchmarks conformance --url http://127.0.0.1:8000 --key KEY

Each case is one request and what its API's documentation says of the answer: status, shape, headers, the end of a
stream. A case may say where this server differs on purpose, and why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

import httpx

from benchmarks.conformance.case import Models
from benchmarks.conformance.run import Found, run

EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks conformance", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument("--key", default=os.environ.get("SERVE_APP_API_KEY", ""), help="its API key")
    parser.add_argument("--account", default="local", help="the account in Workers AI's paths")
    parser.add_argument("--chat", default="@cf/pico/pico-instruct", help="a model that chats")
    parser.add_argument("--embed", default=EMBED, help="one that embeds; '' for none")
    parser.add_argument("--rerank", default="@cf/pico/pico-reranker", help="one that ranks; '' for none")
    parser.add_argument("--only", default="", help="APIs to ask, separated by commas")
    parser.add_argument("--json", action="store_true", help="every case as a JSON object a line")
    asked = parser.parse_args()
    models = Models(asked.chat, asked.embed, asked.rerank, asked.account)
    found = asyncio.run(_ask(asked.url, asked.key, models, {name for name in asked.only.split(",") if name}))
    if asked.json:
        for one in found:
            print(json.dumps(one.json()))
    else:
        print(_table(found))
    return int(any(one.outcome == "fails" for one in found))


async def _ask(url: str, key: str, models: Models, only: set[str]) -> list[Found]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        return await run(client, models, only)


def _table(found: list[Found]) -> str:
    lines = []
    for api in dict.fromkeys(one.api for one in found):
        of_it = [one for one in found if one.api == api]
        counts = {name: sum(one.outcome == name for one in of_it) for name in ("holds", "differs", "fails")}
        shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines.append(f"{api}: {shown}")
        lines += [f"  {one.outcome}: {one.name}: {one.problem}" for one in of_it if one.outcome != "holds"]
    return "\n".join(lines)
