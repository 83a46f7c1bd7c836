"""What is written down of each piece of work: whose it was, what it used, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from serve_app.state.protocols import Row

KIND = "ledger"
Status = Literal["done", "failed", "left"]
HOUR_S, DAY_S = 3600, 86_400
_JSON = msgspec.json.Encoder()
# What a row takes in a journal and in memory, about.
_ROW_BYTES = 400


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One piece of work that has used something.

    ``id``: the request's, with a number behind a point for the further prompts of one request; it counts once. ``key``:
    the id of the key. ``at``: unix seconds of its end; ``seconds``: how long it took. ``adapter``, ``batch``: "" for
    none. ``units``: by the names of `catalog.pricing.UNITS`; of a stream that broke, what was sent. ``neurons``:
    micro-neurons; ``money``: nano-units of ``currency``.
    """

    id: str
    account: str
    key: str
    at: float
    seconds: float
    model: str
    task: str
    status: Status
    units: Mapping[str, int]
    neurons: int
    money: int
    currency: str
    adapter: str = ""
    batch: str = ""

    def row(self) -> Row:
        """For journal and store."""
        # Written out: every request pays for this.
        columns = {
            "id": self.id,
            "account": self.account,
            "key": self.key,
            "at": self.at,
            "seconds": self.seconds,
            "model": self.model,
            "task": self.task,
            "status": self.status,
            "units": _JSON.encode({name: count for name, count in self.units.items() if count}).decode(),
            "neurons": self.neurons,
            "money": self.money,
            "currency": self.currency,
            "adapter": self.adapter,
            "batch": self.batch,
        }
        return Row(KIND, (self.id,), columns, _ROW_BYTES)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Entry:
        """From the columns of its row."""
        return cls(units=msgspec.json.decode(columns["units"]), **{name: columns[name] for name in _PLAIN})


_PLAIN = tuple(name for name in Entry.__struct_fields__ if name != "units")
