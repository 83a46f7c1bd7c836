"""What Ray says of a node that holds a pool."""

from __future__ import annotations

import ray


def pool_name(node_id: str) -> str:
    """Under which Ray knows the pool of a node."""
    return f"kvpool:{node_id}"


def object_store_bytes(node_id: str) -> int:
    """Size of a node's object store; 0 if there is no such node."""
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            return int(node["Resources"].get("object_store_memory", 0))
    return 0
