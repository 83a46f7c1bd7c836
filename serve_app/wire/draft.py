"""Decode worker -> draft worker, once per step: sequences to continue."""

from __future__ import annotations

import msgspec

from serve_app.wire.message import Message, MessageDecoder


class Query(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """See :class:`serve_app.engine.speculation.draft_proposer.DraftQuery`."""

    id: str
    agreed: int
    suffix: list[int]
    adapter: str = ""


class ProposeCall(Message, tag="propose:2", frozen=True):
    """``count`` tokens for each of ``queries``; the sequences ``over`` are forgotten. Answered by
    :class:`Proposals`.
    """

    queries: tuple[Query, ...]
    count: int
    over: tuple[str, ...] = ()


class Proposals(Message, tag="proposals:1", frozen=True):
    """By sequence; None: it is not known (any more), and wanted whole."""

    drafts: dict[str, list[int] | None]


read_propose_call: MessageDecoder[ProposeCall] = MessageDecoder(ProposeCall)
read_proposals: MessageDecoder[Proposals] = MessageDecoder(Proposals)
