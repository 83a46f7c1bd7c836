"""``Retry-After``: when a client that was refused may come again, in whole seconds.

Everything of ours that writes or reads the header does it by this module, but for two that import nothing:
``ray_private/haproxy_config.py``, which runs by its path, and the dashboard's ``session.js``.
"""

from __future__ import annotations

from collections.abc import Mapping

HEADER = "Retry-After"
# Rounding down to 0 would tell clients to hammer on.
LEAST_S = 1


def wait_header(seconds: float) -> dict[str, str]:
    """The header that asks to wait so long."""
    return {HEADER: str(max(LEAST_S, round(seconds)))}


def wait_told(headers: Mapping[str, str]) -> int | None:
    """Seconds that an answer's headers ask to wait; None where they say nothing, or no number. Names of headers that
    HTTP clients give are found in any case.
    """
    told = headers.get(HEADER, "")
    return int(told) if told.isascii() and told.isdigit() else None
