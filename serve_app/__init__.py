"""A self-hosted Workers AI on Ray Serve.

``from serve_app import AI`` gives the Python handle, ``Accounts`` the accounts and their keys; everything else is
reached through its own package.
"""

from typing import TYPE_CHECKING, Any

from serve_app import lean_torch

__version__ = "0.1.0"

if TYPE_CHECKING:
    from serve_app.binding import AI, AsyncAI
    from serve_app.state.manage import Accounts

lean_torch.begin()

__all__ = ["AI", "Accounts", "AsyncAI", "__version__"]


def __getattr__(name: str) -> Any:
    # The binding imports Ray, which the engine and the dialects must be able to live without.
    if name in ("AI", "AsyncAI"):
        from serve_app import binding

        return getattr(binding, name)
    if name == "Accounts":
        from serve_app.state import manage

        return manage.Accounts
    raise AttributeError(f"module 'serve_app' has no attribute {name!r}")
