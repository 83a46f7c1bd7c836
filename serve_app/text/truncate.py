"""Which messages of a conversation go where it is too long for the context window: the oldest exchanges.

Instructions at its beginning stay, and so does what is answered now: the last message of the user with what came of it,
of which the oldest calls with their results go last. What is left begins with a message of the user, as chat templates
want it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Messages = list[dict[str, Any]]
_T = TypeVar("_T")


def without_oldest(messages: Messages, fitting: Callable[[Messages], _T | None]) -> _T | None:
    """What ``fitting`` gives for ``messages`` without as few of the oldest as it takes until it gives something; None
    where nothing more can go. Asks a number of times that grows with the logarithm of the messages.
    """
    order = _in_order_of_leaving(messages)

    def left(parts: int) -> Messages:
        gone = {place for part in order[:parts] for place in part}
        return [message for place, message in enumerate(messages) if place not in gone]

    found = fitting(messages)
    if found is not None or not order:
        return found
    low, high, best = 0, len(order), fitting(left(len(order)))
    # `high` parts fewer fit, `low` do not.
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        found = fitting(left(middle))
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _in_order_of_leaving(messages: Messages) -> list[range]:
    """Places of messages that go together: exchanges from the oldest on, then the last one's older steps."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    begins = [i for i in range(first, len(messages)) if messages[i]["role"] == "user" and _ends(messages, i)]
    if not begins:
        return []
    exchanges = [range(at, until) for at, until in zip([first, *begins[1:]], begins[1:], strict=False)]
    # A call and its results are one step.
    steps = [i for i in range(begins[-1] + 1, len(messages)) if messages[i]["role"] == "assistant"]
    return [*exchanges, *(range(at, until) for at, until in zip(steps, steps[1:], strict=False))]


def _ends(messages: Messages, place: int) -> bool:
    """Whether no other message of the user stands right before."""
    return place == 0 or messages[place - 1]["role"] != "user"
