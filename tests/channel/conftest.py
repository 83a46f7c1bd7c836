"""Everything here runs on asyncio's own loop, which workers have, and on uvloop, which Serve gives to gateways."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request):
    return request.param()
