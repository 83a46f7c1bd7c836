"""Pictures and sounds in conversations, looked at before a request waits for anything: whether they are whole, and how
large or long.

They are decoded in a process with bounds, accounts in turns (`serve_app.media`); how many tokens they take follows from
what is found. It is remembered by account and content, so that the next question on the same file costs a hash, and
nobody can tell by the clock what another account has sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from serve_app.api.errors import InvalidInput, OutOfCapacity
from serve_app.api.fields.content import Medium
from serve_app.api.fields.files import part_file
from serve_app.api.types import GenerateRequest
from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.media.preparing import Full, Preparing
from serve_app.tasks.model import ServedModel
from serve_app.text.media import NOUNS, MediaFile, NoMedia
from serve_app.text.pictures import Picture
from serve_app.text.prompt import file_parts, with_files
from serve_app.text.sounds import Sound

# Pictures, and sounds, of one conversation.
MAX_FILES = 32
# Files of which is remembered how large they are: 100 bytes each.
REMEMBERED = 10_000


class Looker:
    """Of one gateway. Processes start with the first file and end with the gateway."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None
        # Apart from other threads: those with files wait behind each other, and nobody behind them.
        self._preparing: Preparing | None = None
        self._known: OrderedDict[tuple[bytes, Medium, bytes], tuple[int, ...]] = OrderedDict()

    async def look(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> GenerateRequest:
        """The request, of the account that ``salt`` stands for, with :class:`~serve_app.text.media.MediaFile` in place
        of each part that is a picture or sound. Raises `InvalidInput` for what is none, and for a model that takes
        none; `OutOfCapacity` where too many of the account wait.
        """
        messages = request.messages or []
        parts = [(part, f"messages[{i}].content") for i, m in enumerate(messages) for part in file_parts(m)]
        if not parts:
            return request
        for medium, count in Counter(part["type"] for part, _ in parts).items():
            _check(model, medium, count)
        if self._preparing is None:
            self._preparing, self._decoder = Preparing(), Decoder()
        run = self._preparing.run
        looks = [(len(part["source"]["data"]), partial(self._file, model, part, where, salt)) for part, where in parts]
        asked = [asyncio.ensure_future(run(salt, size, look)) for size, look in looks]
        try:
            files = await asyncio.gather(*asked)
        except Full:
            raise OutOfCapacity(
                "Too many pictures or sounds of your account wait to be read already; please try again."
            ) from None
        finally:
            for one in asked:
                one.cancel()
        return replace(request, messages=with_files(messages, files))

    def close(self) -> None:
        if self._preparing is not None and self._decoder is not None:
            self._preparing.close()
            self._decoder.close()
            self._preparing = self._decoder = None

    def _file(self, model: ServedModel, part: dict[str, Any], where: str, salt: bytes) -> MediaFile:
        data, medium = part_file(part, where), part["type"]
        key = salt, medium, sha256(data).digest()
        found = self._known.pop(key, None)
        if found is None:
            try:
                found = self._measured(model, medium, data)
            except BadFile as refused:
                raise InvalidInput(f"{where}: {refused}.", param=where) from None
        self._known[key] = found  # behind those that nobody has asked for since
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return Picture(data, key[2], *found) if medium == "image" else Sound(data, key[2], *found)

    def _measured(self, model: ServedModel, medium: Medium, data: bytes) -> tuple[int, ...]:
        """Width and height of a picture, samples of a sound."""
        assert self._decoder is not None
        if medium == "image":
            return self._decoder.size(data)
        return (self._decoder.length(data, model.tokenizer.sounds.longest_s),)


def _check(model: ServedModel, medium: Medium, count: int) -> None:
    noun = NOUNS[medium]
    if count > MAX_FILES:
        raise InvalidInput(
            f"The conversation has {count} {noun}; at most {MAX_FILES} are taken. Leave old ones out.", param="messages"
        )
    try:
        model.tokenizer.rule_of(medium)
    except NoMedia as reason:
        raise InvalidInput(f"This model takes no {noun}: {reason}. Send text.", param="messages") from None
