"""Gateways on one store."""

from tests.gateway.conftest import served  # noqa: F401
