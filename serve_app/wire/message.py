"""What all messages share: a name with a version, and bytes to and fro.

A message is a msgpack array that begins with its tag, ``name:version``. Processes of two releases meet while an upgrade
replaces replicas one by one, forward or back. So fields are only ever added, behind the others and with a default: a
reader passes over fields that it does not know, and takes the default of those that are not there. A test compares
the fields with those of the last release (``tests/wire/released.json``).

A field that means something else now, or that an older reader must not pass over, needs another version of the message.
The two refuse each other's with :class:`WrongVersion`: a gateway tries other replicas and then answers 3040 with
``Retry-After``, and where it refuses a worker's tokens on the channel, it asks for them by calls. Better is to do it in
two releases, of which the first reads both.

A call that carries one plain value (a request's or a chunk's id) has no message of its own.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
Kinds = type[T] | UnionType


class BadMessage(ValueError):
    """Bytes that are none of the messages expected."""


class WrongVersion(BadMessage):
    """A message of another version of this program: deploy the same version everywhere."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages; each gives its ``tag``."""

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def tag(cls) -> str:
        """``name:version``."""
        return str(cls.__struct_config__.tag)


class MessageDecoder(Generic[T]):
    """Reads bytes as one of the messages it is made for: ``MessageDecoder(Missing | Generated)``."""

    def __init__(self, kinds: Kinds[T]) -> None:
        self._kinds = kinds
        self._decoder = msgspec.msgpack.Decoder(kinds)
        members = kinds.__args__ if isinstance(kinds, UnionType) else (kinds,)
        self._tags = [member.tag() for member in members]

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageDecoder, (self._kinds,)  # Ray pickles actors' classes with what their methods name

    def __call__(self, data: bytes | memoryview) -> T:
        """Raises :class:`WrongVersion` or :class:`BadMessage`."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._explained(data, error) from error

    def _explained(self, data: bytes | memoryview, error: Exception) -> BadMessage:
        tag = _tag_of(data)
        name, _, version = tag.rpartition(":")
        same = [own for own in self._tags if own.rpartition(":")[0] == name]
        if same and tag not in same:
            return WrongVersion(
                f"a message {name} of version {version} where this process reads {', '.join(same)}: "
                "an upgrade is under way, or nodes run different versions of serve_app"
            )
        return BadMessage(f"not a message of {', '.join(self._tags)}: {error}")


def _tag_of(data: bytes | memoryview) -> str:
    try:
        first = msgspec.msgpack.decode(data)[0]
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError):
        return ""
    return first[:100] if isinstance(first, str) else ""
