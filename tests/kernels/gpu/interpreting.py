"""Triton's interpreter, in this process and in ranks that it starts."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from serve_app.parallel.link import LinkAddress
from serve_app.worker.spec import WorkerSpec


def let_loop_bounds_be_arrays() -> None:
    """Triton before 3.8 converts loop bounds, arrays of one element, in a way that numpy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch


def child(spec: WorkerSpec, rank: int, address: LinkAddress, line: Any) -> None:
    """A rank of a process that is started with the environment of its parent."""
    from tests.parallel import groups

    if os.environ.get("TRITON_INTERPRET") == "1":
        let_loop_bounds_be_arrays()
    groups.child(spec, rank, address, line)


def start(spec: WorkerSpec, rank: int, address: LinkAddress) -> Any:
    """As :func:`tests.parallel.groups.start`, whose processes have an environment of their own."""
    from tests.parallel import groups

    return groups.start(spec, rank, address, multiprocessing.get_context("spawn"), child)
