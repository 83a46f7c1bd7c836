"""One small Ray cluster per test session, unless the project's own conftest brings one."""

from __future__ import annotations

import os

# Ray reads these when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_allow_out_of_band_object_ref_serialization", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import pytest

try:
    from tests.conftest import ray_cluster  # noqa: F401
except ImportError:

    @pytest.fixture(scope="session")
    def ray_cluster():
        import ray

        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 * 1024 * 1024,
            namespace="serve_app",
        )
        yield
        ray.shutdown()
