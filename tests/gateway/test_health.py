"""A model is ready while something can answer its requests, whatever else it has lost."""

from __future__ import annotations

import pytest
from ray.serve.schema import DeploymentStatus, ReplicaState

from serve_app.catalog.tasks import declared
from serve_app.gateway.health import ApplicationState, can_serve, has_replicas, troubles_of

TEXT, EMBEDDINGS = declared()["text-generation"], declared()["text-embeddings"]
ALL = {"Text": True, "Decode": True, "Prefill": True, "Draft": True}


def serves(state: str, without: tuple[str, ...] = (), *, before: bool = True, task=TEXT, of=ALL) -> bool:
    return can_serve(ApplicationState(state, "", {**of, **dict.fromkeys(without, False)}), task, before)


@pytest.mark.parametrize("lost", [(), ("Draft",), ("Prefill",), ("Decode",), ("Prefill", "Draft"), ("Decode", "Draft")])
@pytest.mark.parametrize("state", ["unhealthy", "deploy_failed", "deploying"])
def test_a_model_that_was_ready_is_so_while_a_stage_can_answer(state, lost) -> None:
    assert serves(state, lost)


@pytest.mark.parametrize("state", ["unhealthy", "deploy_failed", "deploying"])
def test_without_decode_and_prefill_nothing_answers(state) -> None:
    assert not serves(state, ("Decode", "Prefill"))
    assert not serves(state, ("Decode",), of={"Text": True, "Decode": True, "Draft": True})  # it has no prefill stage
    assert not serves(state, ("Embeddings",), task=EMBEDDINGS, of={"Embeddings": True})


def test_a_model_that_starts_waits_for_all_that_answers_depend_on() -> None:
    assert serves("deploying", ("Draft",), before=False)
    assert not serves("deploying", ("Prefill",), before=False) and not serves("deploying", ("Decode",), before=False)
    # A gateway that starts while prefill is lost does not wait for it.
    assert serves("unhealthy", ("Prefill",), before=False)


def test_what_is_deleted_or_not_there_does_not_serve() -> None:
    assert serves("running") and not serves("deleting") and not serves("not_started")


@pytest.mark.parametrize(
    ("status", "states", "there"),
    [
        ("HEALTHY", {}, True),
        ("UPDATING", {"RUNNING": 1}, True),
        ("UPDATING", {"RECOVERING": 1}, True),
        ("UPDATING", {"STARTING": 1, "STOPPING": 1}, False),
        ("UNHEALTHY", {}, False),
    ],
)
def test_a_new_controller_has_yet_to_ask_replicas_that_never_stopped(status, states, there) -> None:
    replicas = [{"state": ReplicaState(state)} for state, count in states.items() for _ in range(count)]
    assert has_replicas({"status": DeploymentStatus(status), "replicas": replicas}) is there


def test_a_deployment_that_waits_for_room_says_what_it_needs() -> None:
    said = "has 1 replicas that have taken more than 30s to be scheduled"
    told = troubles_of(
        {
            "Text": {"status": DeploymentStatus("HEALTHY"), "message": ""},
            "Decode": {"status": DeploymentStatus("UPDATING"), "message": said},
            "Prefill": {"status": DeploymentStatus("UPDATING"), "message": ""},
        }
    )
    assert told == {"decode": said}
