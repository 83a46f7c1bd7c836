"""Serve's controller, which Serve gives no public way to ask for."""

from __future__ import annotations

# As Serve names it: `ray.serve._private.constants`, which takes long to import.
NAME, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"


def controller_is_there() -> bool:
    """Whether the cluster's controller has been created, so that applications can be deployed."""
    import ray

    try:
        ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
