"""A stream that outlives its connections and its gateways: the client reads on where it was."""

from __future__ import annotations

import asyncio
import json

import httpx

from benchmarks.chaos.asks import Ask
from benchmarks.chaos.dialects import Seen

KEEP_S = 300  # without a client: longer than a server takes to be started again
PATIENCE_S = 300.0
AGAIN_S = 0.3
EMPTY = 20  # answers in a row without a frame: the stream has ended without its end


async def resumed(http: httpx.AsyncClient, ask: Ask, seen: Seen, leaves: int | None) -> int:
    """Reads the ask's stream to its end into ``seen``, and says how often it was lost on the way. ``leaves``: the
    client goes by itself after so many events, and comes back.

    Raises httpx's errors where the stream has not begun, or is refused for good.
    """
    body = {**ask.body, "stream": True, "options": {**ask.body.get("options", {}), "resumable": KEEP_S}}
    last = lost = empty = 0
    while empty < EMPTY:
        before = last
        if seen.request:
            path = f"/v1/requests/{seen.request}/stream"
            sent = http.stream("GET", path, headers={"Last-Event-ID": str(last)})
        else:
            sent = http.stream("POST", ask.path, json=body)
        try:
            async with sent as answer:
                if answer.is_error:
                    await answer.aread()
                    # No gateway is there, or the store is away: the stream is not lost for that.
                    if not seen.request:
                        seen.request, seen.refused = answer.headers.get("cf-ray", ""), True
                        answer.raise_for_status()
                    if answer.status_code not in (429, 503):
                        answer.raise_for_status()
                else:
                    seen.request = seen.request or answer.headers["cf-ray"]
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            if int(line[4:]) != last + 1:
                                raise ValueError(f"frame {line[4:]} follows frame {last}")
                            last += 1
                        elif line == "data: [DONE]":
                            seen.finished = seen.finished or ask.dialect.done
                        elif line.startswith("data: "):
                            ask.dialect.event(seen, json.loads(line[6:]))
                        elif not line and last == leaves:
                            leaves = None
                            break
                    if seen.finished or seen.error is not None:
                        return lost
                    empty = empty + 1 if last == before else 0
        except httpx.TransportError:
            if not seen.request:
                raise
        lost += 1
        await asyncio.sleep(AGAIN_S)
    raise ValueError(f"a resumable stream has ended behind frame {last} without its end")
