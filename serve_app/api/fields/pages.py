"""What lists of every dialect share: ids with a prefix, how many are asked for, and the ends of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.api.errors import InvalidInput

_HEX = re.compile("[0-9a-f]{32}", re.ASCII)


def hex_key(value: str, prefix: str) -> str | None:
    """The 32 hex digits behind ``prefix``; None where ``value`` is something else."""
    digits = value.removeprefix(prefix)
    return digits if value.startswith(prefix) and _HEX.fullmatch(digits) else None


def page_limit(query: Mapping[str, str], usual: int, most: int) -> int:
    """How many the query asks for. Raises `InvalidInput`."""
    given = query.get("limit", "").strip() or str(usual)
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= most):
        raise InvalidInput(f"limit must be an integer between 1 and {most}.", param="limit")
    return int(given)


def page_ends(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ids of the first and the last, None where there is none."""
    return {"first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None}
