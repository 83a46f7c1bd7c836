"""What the fork server imports, so that the processes that it forks need not (:mod:`.fork_server`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

# What Serve's actors and ours import; with Ray, and what of it can be had before.
FIRST = (
    "asyncio",
    "aiohttp",
    "anyio.streams.tls",
    "fastapi",
    "grpc",
    "jinja2",
    "llguidance",
    "numpy",
    "opentelemetry.sdk.metrics",
    "prometheus_client",
    "pydantic.v1",
    "requests",
    "starlette.applications",
    "tokenizers",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
    "yaml",
    "serve_app.gateway.http.app",
    "serve_app.tasks.*.task",
)
THEN = (
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "ray._private.authentication.grpc_authentication_server_interceptor",
    "ray._private.node",
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.haproxy",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "serve_app.app",
    "deployments.decode",
    "deployments.single_stage",
    "deployments.worker",
    "deployments.draft_worker",
    "deployments.encoder_worker",
    "deployments.predictor_worker",
    "serve_app.kv.pool",
)
# What workers that compute import: without Ray, and then with it.
TORCH = (
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "serve_app.engine.build",
    "serve_app.models.encoders.encoder_load",
    "serve_app.models.load",
)
TORCH_THEN = (
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "ray._private.node",
    "ray._private.workers.default_worker",
    "deployments.worker",
    "deployments.draft_worker",
    "deployments.encoder_worker",
    "serve_app.worker.draft_work",
    "serve_app.worker.encoder_work",
    "serve_app.worker.start",
)


def load(modules: tuple[str, ...]) -> None:
    """Imports what of ``modules`` is there; a name with ``.*.`` in it stands for a module of each package below."""
    # Collections take up to a third of the time of imports, which leave little to collect.
    gc.disable()
    try:
        for pattern in modules:
            with contextlib.suppress(ImportError):  # who needs it says so itself
                for name in _named(pattern):
                    importlib.import_module(name)
    finally:
        gc.enable()
    # Collections in the forks leave alone, hence shared, what is there by now.
    gc.collect()
    gc.freeze()


def _named(pattern: str) -> list[str]:
    """A module's name; with ``.*.`` in it that module of every package below the first part."""
    package, star, module = pattern.partition(".*.")
    if not star:
        return [pattern]
    below = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [f"{package}.{found.name}.{module}" for found in below if found.ispkg]
