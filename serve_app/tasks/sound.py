"""Spoken samples as a file of sound, for whoever answers with one: the task itself and the dialects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from serve_app.api.speech import SpeakRequest, Spoken
from serve_app.media.encoding import Encoder


async def encoded(request: SpeakRequest, spoken: AsyncIterator[Spoken]) -> AsyncIterator[bytes]:
    """The sound in the request's format, as it is ready."""
    encoder: Encoder | None = None
    async for piece in spoken:
        if encoder is None:
            encoder = Encoder(
                request.form, piece.rate, out_rate=request.rate, bit_rate=request.bit_rate, streamed=request.stream
            )
        if ready := await asyncio.to_thread(encoder.feed, piece.samples):
            yield ready
    if encoder is not None and (ready := await asyncio.to_thread(encoder.finish)):
        yield ready
