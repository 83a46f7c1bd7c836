"""Pictures in conversations, looked at before a request waits for anything: whether they are whole, and how large.

They are decoded in a process with bounds, accounts in turns (`serve_app.media`); how many tokens they take follows from
their sizes. What is found is remembered by account and content, so that the next question on the same picture costs a
hash, and nobody can tell by the clock what another account has sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from serve_app.api.errors import InvalidInput, OutOfCapacity
from serve_app.api.fields.pictures import MAX_PICTURES, picture_file
from serve_app.api.types import GenerateRequest
from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.media.preparing import Full, Preparing
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
        self._preparing: Preparing | None = None
        self._known: OrderedDict[tuple[bytes, bytes], tuple[int, int]] = OrderedDict()

    async def look(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> GenerateRequest:
        """The request, of the account that ``salt`` stands for, with :class:`~serve_app.text.pictures.Picture` in place
        of each part that is an image. Raises `InvalidInput` for what is no picture, and for a model that takes none;
        `OutOfCapacity` where too many of the account wait.
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
        if self._preparing is None:
            self._preparing, self._decoder = Preparing(), Decoder()
        run, picture = self._preparing.run, self._picture
        sized = [(len(part["source"]["data"]), partial(picture, part, where, salt)) for part, where in parts]
        asked = [asyncio.ensure_future(run(salt, size, look)) for size, look in sized]
        try:
            pictures = await asyncio.gather(*asked)
        except Full:
            raise OutOfCapacity(
                "Too many pictures of your account wait to be read already; please try again."
            ) from None
        finally:
            for one in asked:
                one.cancel()
        return replace(request, messages=with_pictures(messages, pictures))

    def close(self) -> None:
        if self._preparing is not None and self._decoder is not None:
            self._preparing.close()
            self._decoder.close()
            self._preparing = self._decoder = None

    def _picture(self, part: dict[str, Any], where: str, salt: bytes) -> Picture:
        data = picture_file(part, where)
        digest = sha256(data).digest()
        size = self._known.get((salt, digest))
        if size is None:
            assert self._decoder is not None
            try:
                size = self._decoder.size(data)
            except BadFile as refused:
                raise InvalidInput(f"{where}: {refused}.", param=where) from None
            self._known[salt, digest] = size
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return Picture(data, digest, *size)
