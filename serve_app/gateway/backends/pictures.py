"""Pictures in conversations, looked at before a request waits for anything: whether they are whole, and how large.

They are decoded in a process with bounds (`serve_app.media`); how many tokens they take follows from their sizes. What
is found is remembered by content, so that the next question on the same picture costs a hash.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.pictures import MAX_PICTURES, picture_file
from serve_app.api.types import GenerateRequest
from serve_app.media.decoder import PROCESSES, Decoder
from serve_app.media.errors import BadFile
from serve_app.tasks.model import ServedModel
from serve_app.text.pictures import NoPictures, Picture
from serve_app.text.prompt import picture_parts, with_pictures

# Pictures whose sizes are remembered: 100 bytes each.
REMEMBERED = 10_000


class Looker:
    """Of one gateway. Processes start with the first picture and end with the gateway."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None
        # Apart from other threads: those with pictures wait behind each other, and nobody behind them.
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    async def look(self, model: ServedModel, request: GenerateRequest) -> GenerateRequest:
        """The request with :class:`~serve_app.text.pictures.Picture` in place of each part that is an image. Raises
        `InvalidInput` for what is no picture, and for a model that takes none.
        """
        messages = request.messages or []
        parts = [(part, f"messages[{i}].content") for i, m in enumerate(messages) for part in picture_parts(m)]
        if not parts:
            return request
        if len(parts) > MAX_PICTURES:
            message = (
                f"The conversation has {len(parts)} pictures; at most {MAX_PICTURES} are taken. Leave old ones out."
            )
            raise InvalidInput(message, param="messages")
        try:
            model.tokenizer.pictures  # noqa: B018 - says why there are none
        except NoPictures as reason:
            raise InvalidInput(f"This model takes no pictures: {reason}. Send text.", param="messages") from None
        if self._threads is None:
            self._threads, self._decoder = ThreadPoolExecutor(PROCESSES, "pictures"), Decoder()
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(self._threads, self._picture, part, where) for part, where in parts]
        try:
            pictures = [await one for one in asked]
        finally:
            for one in asked:
                one.cancel()
        return replace(request, messages=with_pictures(messages, pictures))

    def close(self) -> None:
        if self._threads is not None and self._decoder is not None:
            self._threads.shutdown(cancel_futures=True)
            self._decoder.close()
            self._threads = self._decoder = None

    def _picture(self, part: dict[str, Any], where: str) -> Picture:
        data = picture_file(part, where)
        digest = sha256(data).digest()
        size = self._known.get(digest)
        if size is None:
            assert self._decoder is not None
            try:
                size = self._decoder.size(data)
            except BadFile as refused:
                raise InvalidInput(f"{where}: {refused}.", param=where) from None
            self._known[digest] = size
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return Picture(data, digest, *size)
