"""The compiled CPU kernels of this process: built, loaded and tested on first use, or the reason why there are none."""

from __future__ import annotations

import functools
import logging
import os

from serve_app.kernels.library import build, native

log = logging.getLogger(__name__)


@functools.cache
def load() -> tuple[native.Library | None, str]:
    """The checked C++ library and what is to be said of it, or None and the reason. Decided once per process."""
    if os.environ.get("SERVE_APP_KERNELS") == "torch":
        return None, "SERVE_APP_KERNELS=torch"
    try:
        library = native.open_library(build.build())
        worst = _self_test(library)
    except Exception as error:  # whatever is wrong with the library, torch still gives right answers
        log.warning("C++ CPU kernels unavailable, plain torch is used (several times slower): %s", error)
        return None, str(error)
    return library, f"{library.note}; self-test error {worst:.1e}"


def cpu_library() -> native.Library | None:
    """The compiled CPU kernels; builds, loads and tests them on the first call (seconds when nothing is
    cached)."""
    return load()[0]


def _self_test(library: native.Library) -> float:
    """Largest error of the C++ kernels against torch on random mixed batches; RuntimeError when one is too
    large."""
    from serve_app.kernels.library.selftest import check_attention, check_rms_norm

    return max(check_attention(library), check_rms_norm(library))
