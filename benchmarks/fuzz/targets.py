"""What is tried, and how one target is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzz import adapters, bodies, files, schemas, stored

Target = Callable[..., None]


def _of(read: Callable[..., None], name: str) -> Target:
    def target(data: bytes) -> None:
        read(name, data)

    return target


# What is tried: a function that must not raise, and strategies for its arguments.
TARGETS: dict[str, tuple[Target, tuple[st.SearchStrategy[Any], ...]]] = {
    **{
        f"body {name}": (_of(bodies.read, name), (bodies.changed(right),))
        for name, (right, _) in bodies.READERS.items()
    },
    "noise": (bodies.read_noise, (st.binary(max_size=200) | st.text(max_size=50).map(str.encode),)),
    "multipart": (lambda pair: bodies.read_parts(*pair), (bodies.parts(),)),
    "format": (lambda pair: schemas.read_format(*pair), (schemas.FORMATS,)),
    **{f"message {name}": (_of(stored.read_message, name), (stored.message_bytes(),)) for name in stored.READERS},
    "frames": (stored.read_stream, (stored.byte_streams(), st.lists(st.integers(0, 999), max_size=8))),
    "pieces": (stored.join_pieces, (stored.PIECES,)),
    "chunk file": (stored.read_chunk, (stored.chunk_files(),)),
    "journal": (stored.read_journal, (stored.journals(),)),
    "adapter": (adapters.read_files, (adapters.CONFIGS | st.just(adapters.TEXT), adapters.FILES)),
    # Made when they are first wanted: they need Pillow and PyAV.
    "picture": (files.read_picture, (st.deferred(lambda: files.changed(files.pictures())),)),
    "sound": (files.read_sound, (st.deferred(lambda: files.changed(files.sounds())),)),
    # JSON is YAML.
    "record": (stored.read_record, (bodies.changed(stored.RECORD),)),
    "settings": (stored.read_settings, (bodies.changed(stored.SETTINGS),)),
}


def attempts(name: str, examples: int, number: int) -> Any:
    """A test of hypothesis that tries one target."""
    target, strategies = TARGETS[name]

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
    )
    @given(st.tuples(*strategies))
    def attempt(arguments: tuple[Any, ...]) -> None:
        try:
            target(*arguments)
        except Exception as error:
            error.add_note(f"{name}: {str(arguments)[:2000]}")
            raise

    return attempt


def run(name: str, examples: int, number: int) -> None:
    """Tries one target; raises what it raised, for the smallest input found."""
    attempts(name, examples, number)()
