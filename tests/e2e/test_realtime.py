"""A transcription session through HAProxy and Serve, with OpenAI's client as it comes."""

from __future__ import annotations

import wave

import pytest
from openai import AsyncOpenAI

from tests.tasks.test_realtime import COMPLETED, FOLDER, MODEL, SAID, sends, session, spoken, until


@pytest.mark.slow  # a model starts
async def test_a_session_over_the_running_stack(stack):
    with wave.open(str(FOLDER / "example.wav")) as file:
        seconds = file.getnframes() / file.getframerate()
    client = AsyncOpenAI(api_key=stack.key, base_url=f"{stack.url}/v1", max_retries=0)
    async with client.realtime.connect(model=MODEL, extra_query={"intent": "transcription"}) as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.session.update(session=session(turn_detection=None))
        await connection.recv()
        await sends(connection, spoken())
        await connection.input_audio_buffer.commit()
        done = (await until(connection, COMPLETED))[-1]
    assert done.transcript == SAID and done.usage.seconds == pytest.approx(seconds, abs=0.01)
