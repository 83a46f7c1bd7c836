"""Bad input by the thousand: everything that reads what others wrote either takes it or refuses it as documented.

    python -m benchmarks fuzz [--minutes 5] [--only NAME] [--seed 1] [--json]

Targets are the dialects' bodies down to prompt and grammar, multipart, grammars, messages and streams of the token
channel, chunk files of the KV cache and journals of the state directory. ``tests/benchmarks/test_fuzz.py`` runs each
for a moment. A finding is shrunk by hypothesis and printed with its input; make a test of it where the cause lies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzz import bodies, schemas, stored

Target = Callable[..., None]
BATCH = 200  # examples of one target before the next has its turn


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
    # JSON is YAML.
    "record": (stored.read_record, (bodies.changed(stored.RECORD),)),
    "settings": (stored.read_settings, (bodies.changed(stored.SETTINGS),)),
}


def run(name: str, examples: int, number: int) -> None:
    """Tries one target; raises what it raised, for the smallest input found."""
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

    attempt()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--only", help="targets whose names contain this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    left = [name for name in TARGETS if options.only is None or options.only in name]
    if not left:
        raise SystemExit(f"no such target; there are {', '.join(TARGETS)}")
    until, number, tried, findings = time.monotonic() + options.minutes * 60, options.seed, 0, {}
    while left and time.monotonic() < until:
        for name in list(left):
            try:
                run(name, BATCH, number)
                tried += BATCH
            except Exception as error:
                left.remove(name)  # until it is mended it would find nothing else
                findings[name] = "".join(traceback.format_exception(error))
                print(f"{name}, seed {number}:\n{findings[name]}", file=sys.stderr, flush=True)
            if time.monotonic() > until:
                break
        number += 1
    print(f"{tried} inputs, {len(findings)} targets with findings: {', '.join(findings) or 'none'}")
    if options.json:
        shown = {name: text.strip().splitlines()[-1] for name, text in findings.items()}
        print(json.dumps({"benchmark": "fuzz", "seed": options.seed, "inputs": tried, "findings": shown}))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
