"""What Serve's controller says of its applications, as the plain data that it sends.

``serve.status()`` says the same, but makes objects of all that comes along, and pickles each deployment's request
router for that: some 40 ms without a pause for anybody else in the process, for what is asked every few seconds.
"""

from __future__ import annotations

from typing import Any


def applications() -> dict[str, dict[str, Any]]:
    """By name; nothing where Serve has not been started. Each has ``status``, ``message`` and ``deployments``: by name,
    ``status`` and ``replicas``, each with its ``state``. All of these are strings. Blocks.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return client.get_serve_details()["applications"] if client is not None else {}
