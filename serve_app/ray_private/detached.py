"""Calls that outlive the HTTP request that caused them.

Serve cancels whatever a request has called when its client leaves. A stream that is to go on without its client makes
its calls as if they came from nobody; whoever awaits them cancels them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def detached() -> Iterator[None]:
    """Calls that begin within the block belong to no request."""
    from ray.serve import context

    token = context._serve_request_context.set(context._RequestContext())
    try:
        yield
    finally:
        context._serve_request_context.reset(token)
