"""What gateways read of Serve is what Serve says to everybody."""

from __future__ import annotations

from collections import Counter

from ray import serve

from serve_app.ray_private.status import applications


def test_the_status_is_that_of_serve(stack) -> None:
    told, public = applications(), serve.status().applications
    assert "gateway" in told and told.keys() == public.keys()
    for name, overview in public.items():
        assert (told[name]["status"], told[name]["message"]) == (overview.status.value, overview.message)
        assert told[name]["deployments"].keys() == overview.deployments.keys()
        for deployment, found in overview.deployments.items():
            ours = told[name]["deployments"][deployment]
            assert ours["status"] == found.status.value
            assert Counter(replica["state"] for replica in ours["replicas"]) == found.replica_states
