"""A self-hosted Workers AI on Ray Serve.

``from serve_app import AI`` gives the Python handle; everything else is reached through its own package.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from serve_app.binding import AI, AsyncAI

__all__ = ["AI", "AsyncAI", "__version__"]


def __getattr__(name: str) -> Any:
    # The binding imports Ray, which the engine and the dialects must be able to live without.
    if name in ("AI", "AsyncAI"):
        from serve_app import binding

        return getattr(binding, name)
    raise AttributeError(f"module 'serve_app' has no attribute {name!r}")
