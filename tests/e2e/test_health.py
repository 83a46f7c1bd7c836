"""What gateways read of Serve is what Serve says to everybody."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from ray import serve

from deployments.calls import call_application
from serve_app.api.errors import ModelLoading
from serve_app.catalog.load import load_catalog
from serve_app.config import load_settings
from serve_app.ray_private.status import applications
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import PROBE
from serve_app.wire.replicas import Nothing
from tests.e2e.conftest import EMBED
from tests.waiting import wait_for


def test_the_status_is_that_of_serve(stack) -> None:
    """Asked until nothing has changed between one and the other: models of other tests come and go."""

    def agree() -> bool:
        told, public = applications(), serve.status().applications
        assert "gateway" in told
        return _plain(told) == {
            name: (
                overview.status.value,
                overview.message,
                {
                    deployment: (found.status.value, Counter(found.replica_states))
                    for deployment, found in overview.deployments.items()
                },
            )
            for name, overview in public.items()
        }

    wait_for(agree)


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (
            application["status"],
            application["message"],
            {
                deployment: (ours["status"], Counter(replica["state"] for replica in ours["replicas"]))
                for deployment, ours in application["deployments"].items()
            },
        )
        for name, application in told.items()
    }


async def test_a_model_that_serve_has_not_been_told_of_is_loading(stack) -> None:
    """After a start sleeping models are asked before their applications are there."""
    home = load_settings({"SERVE_APP_HOME": str(stack.home)}).home
    catalog = load_catalog(home)
    record = catalog[EMBED].model_copy(update={"id": "@cf/pico/not-yet"})
    model = ServedModel(record, record.serving["local"], catalog.source(EMBED), home)
    with pytest.raises(ModelLoading) as told:
        await call_application(model, PROBE, Nothing())
    assert told.value.status == 503 and told.value.retry_after == 2.0
