"""A text said sentence by sentence: the next ones are made while one is sent."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from serve_app.api.errors import InvalidInput
from serve_app.api.speech import SpeakRequest, Spoken
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.predicting import predict
from serve_app.tasks.work import Runtime
from serve_app.text.sentences import sentences

# Sentences that are made at the same time.
AHEAD = 2
# Of silence between two sentences.
PAUSE_MS = 150
# More than any voice takes for a character.
MS_PER_CHAR = 400


def most(request: SpeakRequest) -> dict[str, int]:
    """The most units that saying the text can take."""
    chars = len(request.text)
    return {"characters": chars, "audio_ms": round(chars * MS_PER_CHAR / request.speed) + 1000}


async def speak(runtime: Runtime, model: ServedModel, request: SpeakRequest, caller: Caller) -> AsyncIterator[Spoken]:
    """Raises `InvalidInput` where the model can say nothing of the text. Each sentence has a seed of its own."""
    parts = sentences(request.text)
    facts = {"chars": len(request.text), "sentences": len(parts)}
    async with runtime.work(
        model, caller, reject_if_busy=request.reject_if_busy, facts=facts, worst=most(request), shown=request.stream
    ) as work:

        async def one(number: int) -> tuple[int, Spoken]:
            options = {"speed": request.speed, "voice": request.voice, "seed": request.seed + number}
            [found] = await predict(runtime, work, [parts[number].encode()], options)
            return number, Spoken(base64.b64decode(found["samples"]), found["rate"])

        numbers = iter(range(len(parts)))
        making = deque(asyncio.ensure_future(one(number)) for number in islice(numbers, AHEAD))
        said = False
        try:
            while making:
                sentence, found = await making.popleft()
                if (number := next(numbers, None)) is not None:
                    making.append(asyncio.ensure_future(one(number)))
                if not found.samples:
                    continue
                if said:
                    yield Spoken(bytes(2 * (found.rate * PAUSE_MS // 1000)), found.rate)
                said = True
                yield found
                # Somebody has taken it: a stream that breaks is charged for so much.
                for unit, count in (("characters", len(parts[sentence])), ("audio_ms", found.milliseconds)):
                    work.sent_units[unit] = work.sent_units.get(unit, 0) + count
        finally:
            for task in making:
                task.cancel()
        if not said:
            raise InvalidInput("The text holds none of the characters that this model can say.")
        # What is charged is what the client has asked for, whatever the model makes of it.
        work.units["characters"] = len(request.text)
