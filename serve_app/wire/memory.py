"""What a replica tells the broker of its node's memory, and what it is told."""

from __future__ import annotations

from serve_app.wire.message import Message, MessageDecoder

# What a worker is told: to be up, to be asleep, to leave if nothing is under way, to take nothing new and leave then,
# and that there will never be room.
UP, ASLEEP, LEAVE, CLOSE, NEVER = "up", "asleep", "leave", "close", "never"
# What a replica says beside these: its worker is being ended.
GOING = "going"


class Resident(Message, tag="resident:1", frozen=True):
    """Replica -> broker, again and again. ``number`` counts up; ``knows``: what it was told last.

    ``key``: what its worker is, for what is remembered of it; ``least``, ``likely``, ``grows``: as in
    :class:`serve_app.catalog.need.Need`, ``likely`` 0 for None; ``gpu``: its share of one. ``pinned``: it never sleeps;
    ``optional``: nobody leaves for it. ``state``: asleep, up or going; ``ready``: its worker has loaded, and is process
    ``pid``; ``replica_pid``: the process that says so. ``busy``: work is under way; the last of it ended ``idle_s``
    ago; ``waits``: something waits for it, for ``waited_s``.
    """

    id: str
    model: str
    stage: str
    number: int
    budget: int
    key: str
    least: int
    likely: int
    grows: int
    gpu: float
    pinned: bool
    optional: bool
    ranks: int
    replica_pid: int
    state: str = ASLEEP
    knows: str = ""
    ready: bool = False
    pid: int = 0
    busy: bool = False
    idle_s: float = 0.0
    waits: bool = False
    waited_s: float = 0.0


class TurnTold(Message, tag="turn-told:1", frozen=True):
    """Broker -> replica. ``why``: what it waits for, or why there will never be room, in words."""

    state: str
    why: str = ""


read_resident: MessageDecoder[Resident] = MessageDecoder(Resident)
read_turn_told: MessageDecoder[TurnTold] = MessageDecoder(TurnTold)
