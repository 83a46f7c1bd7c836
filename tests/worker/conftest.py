"""What tests of workers share."""

from __future__ import annotations

import pytest_asyncio

from serve_app.channel.inbox import TokenInbox


@pytest_asyncio.fixture(loop_scope="module")
async def inbox():
    """A gateway's, for one test."""
    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()
