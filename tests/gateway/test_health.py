"""A model is ready while something can answer its requests, whatever else it has lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve.schema import DeploymentStatus, ReplicaState

from serve_app.api.errors import ModelLoading
from serve_app.catalog.tasks import declared
from serve_app.gateway import health
from serve_app.gateway.health import TOLD, ApplicationState, HealthMonitor, can_serve, has_replicas, troubles_of
from serve_app.gateway.models import up
from serve_app.tasks.model import application_name

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


@pytest.mark.parametrize("state", ["deploying", "deploy_failed"])
def test_nothing_answers_where_there_is_no_deployment(state) -> None:
    assert not serves(state, of={}) and not serves(state, of={}, before=False)
    assert not serves("deleting", of={})


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


@pytest.fixture
def model() -> SimpleNamespace:
    record = SimpleNamespace(task="text-generation")
    return SimpleNamespace(id="@cf/a/b", record=record, ready=False, detail={}, scales_to_zero=False, by_hand=False)


async def answers(_: object) -> None:
    pass


async def test_a_gateway_that_starts_has_looked_before_it_answers(monkeypatch, model) -> None:
    looks = 0

    def read():
        nonlocal looks
        looks += 1
        if looks < 3:
            raise ConnectionError("the controller is being restarted")
        return {application_name(model.id): ApplicationState("running", "", ALL)}, []

    monkeypatch.setattr(health, "_read", read)
    monkeypatch.setattr(HealthMonitor, "LOADING_PERIOD_S", 0.01)
    await HealthMonitor([model], answers).start()
    assert model.ready and looks == 3


async def test_a_gateway_starts_though_nothing_can_be_read(monkeypatch, model) -> None:
    def read():
        raise ConnectionError("there is no controller")

    monkeypatch.setattr(health, "_read", read)
    monkeypatch.setattr(health, "FIRST_LOOK_S", 0.1)
    monitor = HealthMonitor([model], answers)
    await monitor.start()
    assert not monitor.ready and monitor.report()["status"] == "loading"


def built_anew(status: str, message: str, deployments: dict[str, tuple[str, int]], monkeypatch) -> None:
    """Serve tells of an application without its deployments, which are ``deployments``: status and running replicas."""
    name = application_name("@cf/a/b")
    told = {"status": status, "message": message, "deployments": {}}
    live = {
        deployment: {"status": said, "message": "", "replicas": [{"state": "RUNNING"}] * count}
        for deployment, (said, count) in deployments.items()
    }
    monkeypatch.setattr(health, "applications", lambda: {name: told})
    monkeypatch.setattr(health, "live_deployments", {name: live}.get)
    monkeypatch.setattr(health, "read_progress", list)


RUNS = {"Text": ("HEALTHY", 0), "Decode": ("HEALTHY", 1), "Prefill": ("HEALTHY", 1), "Draft": ("HEALTHY", 1)}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("status", ["DEPLOYING", "DEPLOY_FAILED"])
async def test_while_an_application_is_built_anew_its_replicas_go_on_for_every_gateway(
    status, before, monkeypatch, model
) -> None:
    """Also for one that has started since; tests/cluster/test_failed_build.py meets it."""
    built_anew(status, "no module x", RUNS, monkeypatch)
    model.ready = before
    monitor = HealthMonitor([model], answers)
    await monitor.refresh()
    assert model.ready and model.detail == {"state": status.lower(), "message": "no module x", "stages": {}}
    # What they lose meanwhile is no secret either.
    built_anew(status, "", {**RUNS, "Decode": ("UNHEALTHY", 0), "Prefill": ("UNHEALTHY", 0)}, monkeypatch)
    await monitor.refresh()
    assert not model.ready


async def test_one_that_was_never_built_tells_why(monkeypatch, model) -> None:
    lines = [f'  File "a_rather_long_name_{n}.py", line {n}, in <module>' for n in range(40)]
    said = "\n".join(["Deploying app 'b' failed with exception:", *lines, "ImportError: no module x"])
    built_anew("DEPLOY_FAILED", said, {}, monkeypatch)
    monitor = HealthMonitor([model], answers)
    await monitor.refresh()
    told = monitor.report()["models"][model.id]["message"]
    assert not model.ready and len(told) == TOLD
    assert told.startswith("Deploying app 'b' failed with exception:\n...") and told.endswith(
        "ImportError: no module x"
    )
    model.elsewhere = False
    with pytest.raises(ModelLoading, match=r"could not be started; GET /health says why\.$"):
        up(model, model.id)
    built_anew("DEPLOYING", "", {}, monkeypatch)
    await monitor.refresh()
    with pytest.raises(ModelLoading, match="is still loading"):
        up(model, model.id)
