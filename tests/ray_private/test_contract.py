"""What we use of Ray that Ray does not promise. When a new Ray breaks one of these, the message says which of our
features goes with it and where it lies.
"""

from __future__ import annotations

import contextvars
import importlib
import inspect
import mmap
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

from serve_app.config import load_settings
from serve_app.ray_private import controller, fork_server, haproxy, haproxy_config, head, preload
from serve_app.ray_private import environment as env

RAY = Path(ray.__file__).parent


@dataclass(frozen=True)
class Used:
    """``name``: module:attribute path. ``takes``: its first parameters, None for what is not called."""

    name: str
    takes: tuple[str, ...] | None
    feature: str
    ours: str

    def __str__(self) -> str:
        return self.name


ROUTER = "ray.serve._private.request_router"
CHOICE = ("the gateway's choice of replicas is not followed: prompts miss their cache", "hinted_router.py")
FORKS = ("workers are executed one by one instead of forked: a start takes seconds longer", "fork_server.py")
DAEMONS = ("daemons that one machine has no use for start as well", "head.py")
STATUS = ("no gateway knows which models can answer", "status.py")
FAILED_BUILD = ("a model that could not be deployed anew is down for every gateway that starts", "status.py")
VERSIONS = ("scaling a model by hand starts all its replicas anew", "versions.py")
STEADY = ("a wall clock that is put back keeps replicas and HAProxy from being looked after", "steady.py")
TESTS = ("tests only", "tests/ray_private/names.py")

USED = [
    Used(
        f"{ROUTER}.pow_2_router:PowerOfTwoChoicesRequestRouter.choose_replicas",
        ("self", "candidate_replicas", "pending_request"),
        *CHOICE,
    ),
    Used(
        f"{ROUTER}.request_router:RequestRouter._fulfill_next_pending_request",
        ("self", "replica", "request_metadata"),
        *CHOICE,
    ),
    *(
        Used(f"{ROUTER}.pow_2_router:PowerOfTwoChoicesRequestRouter.{name}", ("self", "pending_request"), *CHOICE)
        for name in (
            "_cancel_routing_task_for_pending_request",
            "_record_queue_wait_time",
            "_remove_pending_request_from_indices",
        )
    ),
    Used(f"{ROUTER}.replica_wrapper:RunningReplica.replica_id", None, *CHOICE),
    *(Used(f"ray._private.node:Node.{name}", ("self",), *DAEMONS) for name in head.NOT_ON_ONE_MACHINE),
    Used("ray.actor:ActorClassID.from_random", None, *FORKS),
    Used("ray.actor:ActorClassID.size", None, *FORKS),
    Used("ray._raylet:UniqueID.from_random", None, *FORKS),
    Used(
        "ray.serve._private.constants:RAY_SERVE_HAPROXY_SERVER_STATE_BASE",
        None,
        "HAProxy's files stay behind in the temporary directory",
        "haproxy.py",
    ),
    Used("ray.serve.context:_get_global_client", (), *VERSIONS),
    Used("ray.serve._private.client:ServeControllerClient.get_serve_details", ("self",), *STATUS),
    *(
        Used(f"ray.serve._private.controller:ServeController.{name}", ("self", *takes), *FAILED_BUILD)
        for name, takes in (("_all_running_replicas", ()), ("get_deployment_status", ("name", "app_name")))
    ),
    Used("ray.serve._private.common:DeploymentStatusInfo.from_proto", None, *FAILED_BUILD),
    Used("ray.serve.generated.serve_pb2:DeploymentStatusInfo.FromString", None, *FAILED_BUILD),
    Used("ray.serve._private.controller:ServeController.list_deployments_internal", ("self",), *VERSIONS),
    Used("ray.serve._private.controller:ServeController.get_target_groups", None, *TESTS),
    Used("ray._private.internal_api:memory_summary", None, *TESTS),
    Used("ray._raylet:setproctitle", None, *TESTS),
    Used("ray.serve._private.deployment_state:time.time", None, *STEADY),
    Used("ray._common.utils:Timer.time", ("self",), *STEADY),
    Used("ray._common.utils:import_attr", ("full_path",), *TESTS),
    Used("ray.serve._private.api:call_user_app_builder_with_args_if_necessary", ("builder", "args"), *TESTS),
    Used("ray.serve._private.build_app:build_app", None, *TESTS),
]


EDITS = "haproxy_config.py"


def broken(what: str, feature: str, ours: str) -> str:
    return f"Ray {ray.__version__} has no {what} as we use it. What breaks: {feature}. To mend: {ours}"


@pytest.mark.parametrize("used", USED, ids=str)
def test_it_is_there_and_takes_what_we_give(used: Used) -> None:
    message = broken(used.name, used.feature, used.ours)
    module, path = used.name.split(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{message} ({error})")
    if used.takes is not None:
        parameters = tuple(inspect.signature(found).parameters)
        assert parameters[: len(used.takes)] == used.takes, message


def test_a_pending_request_shows_the_hint() -> None:
    from ray.serve._private.common import ReplicaID
    from ray.serve.request_router import PendingRequest

    message = broken("PendingRequest.kwargs, .future or ReplicaID.unique_id", *CHOICE)
    assert {"kwargs", "future"} <= set(PendingRequest.__dataclass_fields__), message
    assert "unique_id" in ReplicaID.__dataclass_fields__, message


def test_the_router_chooses_for_the_request_of_its_task() -> None:
    """The routing loop passes the pending request to ``choose_replicas`` in the task that then fulfils it."""
    from ray.serve._private.request_router.request_router import RequestRouter

    message = broken("RequestRouter, where one task chooses and fulfils,", *CHOICE)
    choosing = inspect.getsource(RequestRouter._choose_replicas_with_backoff)
    assert "self.choose_replicas(" in choosing and "pending_request" in choosing, message
    fulfilling = inspect.getsource(RequestRouter._fulfill_pending_requests)
    assert "_choose_replicas_with_backoff" in fulfilling and "_fulfill_next_pending_request" in fulfilling, message


# -- fork_server.py ------------------------------------------------------------


def test_workers_are_started_by_sys_executable_with_the_program_we_fork() -> None:
    from ray._private import services

    message = broken("worker command", *FORKS)
    assert (RAY / "_private" / "workers" / fork_server.WORKER).is_file(), message
    command = re.search(r"start_worker_command = \(\s*\[\s*sys\.executable", inspect.getsource(services.start_raylet))
    assert command is not None, message


@pytest.mark.parametrize("module", [name for name in (*preload.THEN, *preload.TORCH_THEN) if name.startswith("ray.")])
def test_what_a_fork_server_imports_before_its_forks_exists(module: str) -> None:
    assert find_spec(module) is not None, broken(module, *FORKS)


def test_ray_reads_these_variables_when_its_library_is_loaded() -> None:
    with open(RAY / "_raylet.so", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        missing = [name for name in fork_server.DISTINCT if library.find(name.encode()) < 0]
    assert missing == [], broken(f"variable {missing}", "forks get another worker's job", "fork_server.py: DISTINCT")


def test_a_class_that_becomes_an_actor_draws_its_number_where_we_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all forks would draw the same ids from Ray's generator, or launchers would do without a server."""
    from ray.actor import ActorClassID

    class Some:
        pass

    drawn = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(size) or real(size))
    with fork_server._fixed_class_ids():
        ray.remote(Some)
    assert ActorClassID.size() in drawn, broken("ray.actor.ActorClassID in making actors", *FORKS)


# -- controller.py -------------------------------------------------------------


def test_the_controller_has_the_name_we_look_for() -> None:
    from ray.serve._private import constants

    message = broken("controller of this name", "a local start never sees Serve come up", "controller.py")
    assert (constants.SERVE_CONTROLLER_NAME, constants.SERVE_NAMESPACE) == (controller.NAME, controller.NAMESPACE), (
        message
    )


# -- environment.py ------------------------------------------------------------


def test_ray_knows_every_variable_we_set() -> None:
    """A renamed variable would be ignored without a word; Ray's own source is the authority."""
    settings = load_settings({"SERVE_APP_HOME": "/nonexistent"})
    names = {
        *env.serving_env(),
        *env.ONE_MACHINE,
        *settings.ray_environment(),
        *haproxy.haproxy_environment(),
        *haproxy.haproxy_files(Path("/x")),
    }
    names -= {"SERVE_APP_HAPROXY", "SERVE_APP_PYTHON"}  # for our script
    for folder in ("serve/_private", "_private", "_common", "dashboard/modules/reporter"):
        for path in (RAY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            names -= {name for name in names if f'"{name}"' in text}
    for program in ("core/src/ray/gcs/gcs_server", "_raylet.so"):
        code = (RAY / program).read_bytes()
        names -= {name for name in names if name.encode() in code}
    assert names == set(), broken(
        f"variable {sorted(names)}", "its comment says what", "environment.py and cluster.yaml"
    )


def test_serve_takes_the_values_over() -> None:
    code = (
        "from ray.serve._private import constants as c; print(c.RAY_SERVE_ENABLE_HA_PROXY, "
        "c.RAY_SERVE_USE_GRPC_BY_DEFAULT, c.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, "
        "c.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, c.RAY_SERVE_HAPROXY_BINARY_PATH)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env.serving_env(), **haproxy.haproxy_environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", str(64 * 2**20), "1800", str(haproxy.SCRIPT)]


# -- haproxy.sh ----------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path) -> tuple[list[str], str]:
    """The arguments and the configuration that HAProxy gets, of the template as Serve writes it."""
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    written = tmp_path / "haproxy.cfg"
    written.write_text(HAPROXY_CONFIG_TEMPLATE)
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o700)
    done = subprocess.run(
        [haproxy.SCRIPT, "-db", "-f", written],
        env={**os.environ, "SERVE_APP_HAPROXY": str(program)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), written.read_text()


def test_statistics_and_metrics_stay_on_loopback(started: tuple[list[str], str]) -> None:
    binds = re.findall(r"^ *bind (\S+)", started[1], re.MULTILINE)
    inner = [bind for bind in binds if "frontend_host" not in bind and not bind.startswith("{{")]
    message = broken("bind line of statistics and metrics", "they answer to everybody, without a key", "haproxy.sh")
    assert len(inner) == 2 and all(bind.startswith("127.0.0.1:") for bind in inner), f"{message} {binds}"


def test_where_no_gateway_is_reached_the_answer_is_ours(started: tuple[list[str], str]) -> None:
    files = dict(re.findall(r"^ *errorfile (\d+) (\S+)", started[1], re.MULTILINE))
    message = broken("section `defaults`", "clients get a bare 500 instead of 503 with Retry-After", EDITS)
    assert set(files) == {"502", "503", "504"} and len(set(files.values())) == 1, message
    assert Path(files["503"]).read_bytes() == haproxy_config.unavailable(), message


@pytest.mark.parametrize(
    ("line", "count", "feature"),
    [
        (r"stats socket .* mode 600 level admin.*", 1, "every local user can redirect the API's traffic"),
        (
            r"http-request return status 404 .*/no_route\.json if routes",
            1,
            "/-/routes tells what is served, without a key",
        ),
        (r"http-request return status 503 default-errorfiles", 1, "a gateway that restarts is a 404"),
        (r"maxconn \d+", 1, "4,096 idle connections shut everybody out"),
        (r"timeout http-request 10s", 1, "half-sent requests shut everybody out"),
        (r"tcp-request connection reject if \{ sc0_conn_cur gt \d+ \}", 1, "one address takes all connections"),
    ],
)
def test_what_serve_writes_is_set_right(started: tuple[list[str], str], line: str, count: int, feature: str) -> None:
    message = broken(f"line {line!r} after our edits", feature, EDITS)
    assert len(re.findall(rf"^ *{line}$", started[1], re.MULTILINE)) == count, message
    assert "mode 666" not in started[1], message


def test_a_configuration_is_set_right_once(started: tuple[list[str], str], tmp_path: Path) -> None:
    assert haproxy_config.corrected(started[1], tmp_path) == started[1]


def test_serve_keeps_the_list_of_its_daemons() -> None:
    message = broken("Node.dead_processes", "a server without Ray looks alive", "head.py")
    from ray._private import worker
    from ray._private.node import Node

    assert hasattr(worker, "_global_node") and callable(Node.dead_processes), message


def test_splicing_is_off(started: tuple[list[str], str]) -> None:
    from ray.serve._private import haproxy as serves

    message = broken("HAProxy command", "a client that leaves is not noticed, and its answer goes on", "haproxy.sh")
    assert started[0] == ["-dS", "-db", "-f", started[0][-1]], message
    assert '[haproxy_bin, "-db", "-f", self.config_file_path]' in inspect.getsource(serves), message
    # The reason for -dS; without these lines it can go.
    assert "option splice-request" in started[1], message
    binary = haproxy.haproxy_environment()["SERVE_APP_HAPROXY"]
    done = subprocess.run([binary, "-dS", "-v"], capture_output=True, text=True)
    assert done.returncode == 0 and "HAProxy version" in done.stdout, message


def test_a_deployment_can_keep_its_version() -> None:
    from ray import serve
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve._private.version import DeploymentVersion

    from serve_app.ray_private.versions import of_version

    message = broken("version of a deployment", *VERSIONS)

    @serve.deployment
    class Nothing: ...

    assert of_version(Nothing, "v7")._version == "v7", message
    assert "version" in inspect.signature(DeploymentInfo.__init__).parameters, message
    # Of what may change, bounds of replicas are not among what starts replicas anew.
    assert "autoscaling" not in inspect.getsource(DeploymentVersion.requires_actor_restart), message


def test_a_call_can_belong_to_no_request() -> None:
    """Serve cancels the calls of a request by this when its client leaves."""
    from ray.serve import context

    from serve_app.ray_private.detached import detached

    def look() -> list[str]:
        context._serve_request_context.set(context._RequestContext(_internal_request_id="parent"))
        found = [context._get_serve_request_context()._internal_request_id]
        with detached():
            found.append(context._get_serve_request_context()._internal_request_id)
        return [*found, context._get_serve_request_context()._internal_request_id]

    assert contextvars.copy_context().run(look) == ["parent", "", "parent"]


def test_a_replica_can_tell_that_it_drains() -> None:
    """Else workers that Serve takes away are chosen until they are gone (`draining.py`)."""
    from ray._private.worker import global_worker
    from ray.serve._private import replica

    assert global_worker.actors == {} or all(global_worker.actors)
    assert "self._shutting_down = True" in inspect.getsource(replica.Replica._perform_graceful_shutdown)
    assert "self._shutting_down = False" in inspect.getsource(replica.Replica.__init__)
    assert "self._replica_impl: Replica" in inspect.getsource(replica)
