"""Rows into the store, so that one that is at fault keeps no other, and none is given up for what passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from serve_app.state.errors import Away, StateError
from serve_app.state.protocols import Row, Store

# What went wrong may be the moment's and not the row's.
TRIES = 3
PAUSE_S = 0.2


def write(store: Store, rows: Sequence[Row], refused: Callable[[Row, Exception], None]) -> None:
    """Writes them together, or where that fails one by one, each several times; ``refused`` gets those that cannot be
    written. Raises :class:`Away` and :class:`StateError`.
    """
    if _problem(store, rows) is None:
        return
    failed = [(row, problem) for row in rows if (problem := _problem(store, [row])) is not None]
    for _ in range(TRIES - 1):
        if not failed:
            return
        time.sleep(PAUSE_S)
        failed = [(row, problem) for row, _ in failed if (problem := _problem(store, [row])) is not None]
    for row, problem in failed:
        refused(row, problem)


def _problem(store: Store, rows: Sequence[Row]) -> Exception | None:
    try:
        store.write(rows)
    except (Away, StateError):
        raise
    except Exception as error:
        return error
    return None
