"""A private Ray on this machine with all applications on it, and the way for other processes to find it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import Catalog, load_catalog
from serve_app.catalog.ranks import check_room
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.config import Settings
from serve_app.inner_ports import InnerPorts
from serve_app.ray_private import environment as ray_environment
from serve_app.ray_private.controller import controller_is_there
from serve_app.ray_private.fork_server import TORCH_FORKS, ForkServer
from serve_app.ray_private.haproxy import haproxy_environment, haproxy_files
from serve_app.ray_private.head import ended_daemons, job_config, one_machine
from serve_app.run_directory import RunDirectory
from serve_app.state.check import read_operated

Say = Callable[[str], None]
log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Attachment:
    """What a driver needs to attach to a running cluster; kept in ``$SERVE_APP_HOME/run/cluster.json`` (owner only)."""

    address: str
    token_path: str
    url: str
    pid: int
    logs: str


class NotRunning(RuntimeError):
    """No cluster can be found."""


def attachment_file(home: Path) -> Path:
    return home / "run" / "cluster.json"


def read_attachment(home: Path) -> Attachment:
    """The cluster that ``serve-app serve`` started with this home. Raises :class:`NotRunning`."""
    try:
        found = Attachment(**json.loads(attachment_file(home).read_text()))
        os.kill(found.pid, 0)
    except (OSError, ValueError, TypeError):
        raise NotRunning(f"no running server is known in {home}; start one with `make serve`") from None
    return found


class LocalCluster:
    """Ray, HAProxy and Serve in child processes of this one; :meth:`stop` ends all of them and nothing else.

    ``import ray`` happens here and not before, since Ray and Serve read their environment when they are imported.
    """

    def __init__(self, settings: Settings, say: Say = lambda line: None, catalog: Catalog | None = None) -> None:
        """``catalog``: where it has been read already."""
        self._settings = settings
        self._say = say
        self._given = catalog
        self._folder = RunDirectory()
        self._ports = InnerPorts()
        self._started = False
        self._waiting: dict[str, Any] = {}
        self._planted: list[Any] = []
        self._fork_server: ForkServer | None = None

    @cached_property
    def environment(self) -> dict[str, str]:
        """The variables under which Ray and Serve are started here. What the operator has set stays."""
        wanted = self._settings.ray_environment()
        chosen = self._ports.choose(int(port) for port in wanted.values())
        ports = {name: str(port) for name, port in zip(wanted, chosen, strict=True)}
        values = {
            **ray_environment.serving_env(),
            **ports,
            **ray_environment.ONE_MACHINE,
            **haproxy_environment(),
            "SERVE_APP_LOG": self._settings.log,
            "SERVE_APP_LOG_CONTENT": str(self._settings.log_content).lower(),
        }
        return {name: os.environ.get(name, value) for name, value in values.items()} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._running_token),
            **haproxy_files(self._folder.haproxy),
            # Else torch makes a folder in the place that all users share, whose name anybody can guess.
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder.path / "inductor"),
        }

    def start(self) -> None:
        """Starts Ray and Serve and deploys the applications; models go on loading after it returns."""
        started = time.monotonic()
        self.start_ray()
        self._say(f"Ray is up ({time.monotonic() - started:.1f} s)")
        self.start_serving()
        self._say(f"Serve and HAProxy are up ({time.monotonic() - started:.1f} s)")

    def start_ray(self) -> None:
        """Only Ray, with the environment that everything else here relies on."""
        os.environ.update(self.environment)
        launching = self._launching()
        import ray

        with launching, one_machine():
            ray.init(
                address="local",
                # Logical: our actors ask for fractions, and threads are bounded by the catalogue.
                num_cpus=max(8, os.cpu_count() or 1),
                object_store_memory=self._settings.object_store_bytes,
                include_dashboard=False,
                namespace="serve_app",
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=str(self._folder.ray),
                job_config=job_config(),
            )
        self._started = True

    def problem(self) -> str | None:
        """Why nothing here can go on, in words; None while Ray lives."""
        ended = ended_daemons() if self._started else []
        return f"Ray's {' and '.join(ended)} has ended" if ended else None

    def _launching(self) -> AbstractContextManager[None]:
        """Has Ray's workers forked where that works: elsewhere system libraries do not survive it."""
        if sys.platform != "linux":
            return nullcontext()
        with_torch = compute_on_cpus(self._catalog.started(self._settings.profile, self._settings.models))
        try:
            self._fork_server = ForkServer(self._folder.path, with_torch=with_torch)
        except OSError as error:  # such as a path too long for a socket
            logging.getLogger(__name__).warning("workers start one by one, without a fork server: %s", error)
            return nullcontext()
        if with_torch:
            os.environ[TORCH_FORKS] = "1"
        return self._fork_server.launching()

    @cached_property
    def _catalog(self) -> Catalog:
        if self._given is not None:
            return self._given
        settings = self._settings
        return load_catalog(settings.home, operated=read_operated(settings.home, settings.database))

    def start_serving(self) -> None:
        """Serve and the applications on a running Ray."""
        from ray import serve

        from serve_app.app import applications, plant_workers, urgent

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._check_room()
        settings = self._settings
        # Serve waits for its proxies; the applications can start meanwhile, as soon as there is a controller.
        with ThreadPoolExecutor(1) as background:
            serving = background.submit(
                serve.start,
                http_options={
                    "host": settings.host,
                    "port": settings.port,
                    "request_timeout_s": settings.request_timeout_s,
                },
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            self._planted = plant_workers(settings, self._catalog)
            built, first_names = applications(settings, self._catalog), urgent(settings, self._catalog)
            _wait_for_controller(serving)
            self._waiting = {name: app for name, app in built.items() if name not in first_names}
            _deploy({name: app for name, app in built.items() if name in first_names})
            serving.result()
        if len(first_names) == 1:
            self.deploy_rest()
        self._remember()

    def _check_room(self) -> None:
        """Of models whose workers have more ranks than this machine can ever place, refuses those that were asked for
        and leaves out the others.
        """
        import ray

        catalog, named = self._catalog, self._settings.models
        started = catalog.started(self._settings.profile, named)
        if any(stage.ranks > 1 and stage.num_gpus for _, profile in started for stage in profile.stages.values()):
            gpus = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
            fit: list[str] = []
            refused: CatalogError | None = None
            for record, profile in started:
                try:
                    check_room(record, profile, gpus, catalog.source(record.id))
                    fit.append(record.id)
                except CatalogError as error:
                    refused = error
                    if record.id in named:
                        raise
                    catalog.problems[record.id] = error.told
                    catalog.operated = {name: said for name, said in catalog.operated.items() if name != record.id}
                    self._say(f"leaving out {record.id}: {error.told}")
                    log.warning("%s is not served: %s", record.id, error.told)
            if refused is not None and not fit:
                raise refused
            if len(fit) < len(started):
                self._given = catalog
                self._settings = self._settings.model_copy(update={"models": tuple(fit)})

    def deploy_rest(self) -> None:
        """Deploys what :meth:`start` left for later."""
        waiting, self._waiting = self._waiting, {}
        _deploy(waiting)

    def stop(self) -> None:
        """Ends everything this process started. A Ray that has lost a part is not asked, which would take minutes."""
        attachment_file(self._settings.home).unlink(missing_ok=True)
        broken = self.problem() is not None
        # Daemons that end from here on are no problem.
        started, self._started = self._started, False
        if broken:
            self._keep_logs()
        if started and not broken:
            import ray
            from ray import serve

            # What Ray says about actors that are being ended is of no use to anybody.
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                try:
                    serve.shutdown()
                except Exception:  # a half-dead cluster must not keep us from ending the rest
                    logging.getLogger(__name__).debug("Serve did not shut down cleanly", exc_info=True)
                ray.shutdown()
        if self._fork_server is not None:
            self._fork_server.stop()
        self._folder.close()
        self._ports.close()

    def _keep_logs(self) -> None:
        """Ray's logs of a server that was lost, for whoever asks why; those of the one before it go."""
        kept = self.lost_logs
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self._folder.ray / "session_latest" / "logs", kept, ignore_dangling_symlinks=True)

    @property
    def lost_logs(self) -> Path:
        return self._settings.home / "run" / "lost-ray-logs"

    @cached_property
    def _running_token(self) -> Path:
        """A copy for what runs now, which the loss of the file in the state directory does not disturb."""
        path = self._folder.path / "ray_token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
            stream.write(self._token().read_text())
        return path

    def _token(self) -> Path:
        path = self._settings.home / "ray_token"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(secrets.token_hex(32))
        return path

    def _remember(self) -> None:
        import ray

        path = attachment_file(self._settings.home)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shown = "127.0.0.1" if self._settings.is_loopback else self._settings.host
        found = Attachment(
            ray.get_runtime_context().gcs_address,
            str(self._running_token),
            f"http://{shown}:{self._settings.port}",
            os.getpid(),
            str(self._folder.ray / "session_latest" / "logs" / "serve"),
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(asdict(found), stream)


def compute_on_cpus(started: Iterable[tuple[ModelRecord, Profile]]) -> bool:
    """Whether a stage of these models does: a worker with a GPU is not forked with torch."""
    return any(not stage.num_gpus for _, profile in started for stage in profile.stages.values())


def _wait_for_controller(serving: Future[Any]) -> None:
    while not serving.done():
        if controller_is_there():
            return
        time.sleep(0.05)
    serving.result()


def _deploy(built: dict[str, Any]) -> None:
    from ray import serve

    if not built:
        return
    targets = [
        serve.RunTarget(target=app, name=name, route_prefix="/" if name == "gateway" else None)
        for name, app in built.items()
    ]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def attach(home: Path) -> Any:
    """Connects this process to the running cluster as a driver, unless it is connected already; returns ``ray``."""

    if "ray" not in sys.modules:
        ray_environment.apply(ray_environment.client_env(), os.environ)
    import ray

    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(namespace="serve_app", log_to_driver=False, logging_level=logging.ERROR,
                     job_config=job_config())  # fmt: skip
            return ray
        found = read_attachment(home)
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = found.token_path
        ray.init(address=found.address, namespace="serve_app", log_to_driver=False, logging_level=logging.ERROR,
                 job_config=job_config())  # fmt: skip
    from ray import serve  # noqa: F401 - sets its logger's level when it is imported

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray
