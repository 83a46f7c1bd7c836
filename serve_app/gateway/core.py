"""One gateway replica without HTTP: what the routes and the Python handle both call."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from serve_app.api.envelopes import envelope, success
from serve_app.api.errors import as_api_error
from serve_app.api.fields.asked import with_headers
from serve_app.api.fields.body import check_object
from serve_app.api.fields.lora import with_lora
from serve_app.api.types import Event, GenerateRequest, ModelLimits, TaskRequest
from serve_app.batch.check import Known
from serve_app.batch.front import Batches
from serve_app.batch.sheet import Terms
from serve_app.catalog.load import load_catalog
from serve_app.catalog.price_file import PriceFile
from serve_app.catalog.prompts import Prompts
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.served import gateway_name
from serve_app.gateway import canary, prometheus
from serve_app.gateway.adapters import Adapters, Bounds
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.gateway.booking import Booking
from serve_app.gateway.dispatch.guest import Desk, Guests
from serve_app.gateway.dispatch.owner import Owners
from serve_app.gateway.dispatch.subscriptions import Subscriptions, Wake, Wanted
from serve_app.gateway.health import HealthMonitor
from serve_app.gateway.history import History
from serve_app.gateway.http import request_id
from serve_app.gateway.listed import Listed
from serve_app.gateway.models import Models, up
from serve_app.gateway.operate import ByHand
from serve_app.gateway.price_watch import PriceWatch
from serve_app.gateway.prompt_log import Prompts as PromptLog
from serve_app.gateway.reports import Reports
from serve_app.gateway.resume.keys import Keys
from serve_app.gateway.resume.streams import Streams
from serve_app.gateway.runners import Runners
from serve_app.gateway.scaling import ScalingLog
from serve_app.gateway.settings import GatewaySettings
from serve_app.gateway.shipped import Shipped
from serve_app.gateway.status import TIMEOUT_S
from serve_app.gateway.tally import Tally
from serve_app.gateway.tracing.export import tracing
from serve_app.gateway.webhooks import Receiver, Webhooks
from serve_app.state.callers.accounts import Caller
from serve_app.state.state import State
from serve_app.tasks.backend import Backend
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.estimate import Estimate, Estimated, together
from serve_app.tasks.model import ServedModel
from serve_app.tasks.registry import tasks
from serve_app.tasks.task import Answer, Body, Streamed
from serve_app.tasks.work import Runtime, Settlement
from serve_app.wire.load import LoadReport
from serve_app.wire.methods import PROBE
from serve_app.wire.replicas import Nothing

log = logging.getLogger("ray.serve")

Headers = Mapping[str, str]
_NONE: Headers = MappingProxyType({})
_JSON = {"accept": "application/json"}  # who calls the handle gets objects, and no files


class Gateway:
    """``call`` reaches a model's application, ``ask_all`` every replica of it; the gateway knows nothing else of Ray.

    ``host`` is the address at which workers reach this replica's token inbox.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        call: Call,
        ask_all: AskAll | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.settings = settings
        self.ask_all = ask_all
        home = Path(settings.home)
        self.state = State(
            home,
            settings.account,
            settings.key_hashes,
            database=settings.database,
            files=settings.files,
            rate_limits=settings.rate_limits,
            ledger_days=settings.ledger_days,
            give_away=settings.give_away,
            fsync=settings.ledger_fsync,
            plan=settings.plan,
            away_s=settings.store_away_s,
            alert_shares=settings.alert_shares,
        )
        self.catalog = load_catalog(home)
        price_file = PriceFile(home, Path(settings.prices) if settings.prices else None)
        self.prices = self.catalog.prices(price_file.begin())
        self.price_watch = PriceWatch(price_file, self.prices)
        self.prompts = Prompts(home)
        self.prompt_log = PromptLog(self.state.prompts, self.state.accounts)
        self.models = Models(self.catalog, settings.profile, settings.models, home)
        self.guests = Guests(self._desk)
        self.inbox = TokenInbox(host, on_load=self._load, on_visit=self.guests.visit)
        self.owners = Owners(lambda: gateway_name(self.inbox.address))
        self.health = HealthMonitor(self.models, lambda m: call(m, PROBE, Nothing()))
        self.engine = EngineBackend(self.inbox, call, ask_all)
        # What answers a model instead of engine workers, by its id.
        self.backends: dict[str, Backend] = {}
        self.adapters = Adapters(
            self.state, self.models, home, Bounds(settings.lora_adapters, settings.lora_file_bytes)
        )
        self.listed = Listed(self.catalog, self.models, self.adapters, self.limits)
        self.shipped = Shipped(self.state, self.models)
        self.tally = Tally(uuid.uuid4().hex[:16])
        self.settlement = Settlement(self.tally)
        booking = Booking(self.settlement, self.state.ledger)
        self.runtime = Runtime(
            call,
            self.backend,
            self.settlement,
            settings.max_inflight,
            salt=settings.tenant_salt,
            traces=self.state.traces,
            request_id=request_id.current.get,
            prices=self.prices,
            check=self.state.ledger.check,
            book=booking,
            keep=booking.keep,
            allowance=self.state.allowance,
            adapter=self.adapters.choose,
            ask_all=ask_all,
        )
        self.tracing = tracing()
        self.state.traces.ended = self.tracing.ended
        self.history = History(self.tally, self.state, self.runtime.running.values, self._waiting)
        self.reports = Reports(
            self.state, self.tally.gateway, self.history.told, self.counted, lambda: bool(self.runtime.running)
        )
        self.history.runners = self.reports.fresh
        # The node's name as workers tell it; and what asks all gateways for what they have counted.
        self.node = ""
        self.ask_counted: Callable[[], Awaitable[list[bytes]]] | None = None
        self.scaling = ScalingLog(self.routing_stats)
        self.state.streams.max_bytes = settings.resume_bytes
        of_alerts = (settings.alert_secret, settings.alert_private, "SERVE_APP_ALERT_PRIVATE")
        operator = Receiver(settings.alert_url, *of_alerts) if settings.alert_url else None
        self.webhooks = Webhooks(self.state, operator, private=settings.webhook_private)
        self.streams = Streams(self.state.streams, settings.resume_max_s)
        self.keys = Keys(self.streams, self.state.answers)
        self.state.batches.max_left = settings.batch_max_left
        self.runners = Runners(self.state)
        terms = Terms(settings.batch_hours, settings.batch_keep_s, settings.batch_file_bytes)
        self.batches = Batches(
            self.state.batches,
            self.state.uploads,
            lambda: self.state.files,
            self.known,
            terms,
            secrets.token_hex(16),
            self.runners.wake,
        )
        self._subscriptions = None
        if ask_all is not None:
            self._subscriptions = Subscriptions(self.models, self.inbox, ask_all, self._plan, self._told)
            self._wake = Wake(call)
            self._expect_reports(self.models)
        self.by_hand = ByHand(self.state, self.models, home, settings.account, self._adopted)

    async def start(self, *, clients: bool = True) -> None:
        """``clients``: some are served here, and not batches alone: streams are taken over, events are sent."""
        if self.settings.several_nodes and self.settings.database is None:
            log.warning("several nodes without SERVE_APP_DATABASE: accounts, limits, responses and traces stay on each")
        await self.state.start()
        await self.by_hand.start()
        await self.inbox.start()
        await self.health.start()
        if clients:
            self.streams.start()
            self.webhooks.start()
            self.runners.start()
            self.shipped.start()
            self.scaling.start()
        else:
            self.reports.start()
        self.price_watch.start()
        self.history.start()
        if self._subscriptions is not None:
            self._subscriptions.start(plans=clients)

    def close(self) -> None:
        """Leaves what runs to other gateways, and writes what waits. Blocks for seconds at most; once is enough."""
        self.runners.close()
        self.by_hand.close()
        self.price_watch.close()
        self.shipped.close()
        self.webhooks.close()
        self.keys.close()
        self.streams.close()
        self.batches.close()
        self.adapters.close()
        self.tracing.close()
        self.history.close()
        self.reports.close()
        self.engine.close()
        self.state.close()

    def _expect_reports(self, models: Iterable[ServedModel]) -> None:
        """Has the models' dispatchers ask workers for reports, where there are any to ask."""
        if self._subscriptions is None:
            return
        for model in models:
            if self.engine.serves(model):
                dispatcher = self.engine.dispatcher(model)
                dispatcher.start_worker = partial(self._wake.first, model)
                dispatcher.hurry = self._subscriptions.hurry
                dispatcher.owner_at, dispatcher.guests = self.owners.at, self.guests.names
                dispatcher.expect_reports()

    def _adopted(self, new: list[ServedModel], gone: list[ServedModel]) -> None:
        """Models have come and gone by hand."""
        self.prices.recatalogue(self.catalog.own_prices)
        for model in gone:
            self.engine.forget(model)
        self._expect_reports(new)
        if any(model.record.adapters is not None for model in new):
            self.shipped.start()

    def _plan(self, model: ServedModel) -> Wanted:
        dispatcher = self.engine.dispatcher(model)
        needed = dispatcher.needed()
        self._wake.where_needed(model, needed, dispatcher.stages)
        silent = frozenset(model.profile.stages) - dispatcher.stages
        return Wanted(needed, dict(dispatcher.roles), silent)

    def _told(self, model: ServedModel, listens: bool) -> None:
        self.engine.dispatcher(model).told(listens)

    def routing_stats(self) -> dict[str, dict[str, Any]]:
        """Of every model that engine workers serve, for metrics."""
        return {m.id: self.engine.dispatcher(m).stats() for m in self.models if self.engine.serves(m)}

    def counted(self) -> bytes:
        """What this gateway has counted since its start, for whichever is asked for metrics."""
        running = Counter(work.model.id for work in self.runtime.running.values())
        return prometheus.told(self.tally, self.node, self.routing_stats(), running)

    async def exposition(self) -> bytes:
        """All that gateways and workers of this node tell, as Prometheus reads it."""
        gateways = [self.counted()]
        if self.ask_counted is not None:
            try:
                gateways = await asyncio.wait_for(self.ask_counted(), TIMEOUT_S)
            except Exception as error:  # one is being replaced
                log.info("the other gateways did not tell their counts (%s)", type(error).__name__)
        gateways += await self.reports.counted()
        workers = {
            model: [load for load in stats["workers"] if not self.node or load["node"] == self.node]
            for model, stats in self.routing_stats().items()
        }
        return await asyncio.to_thread(prometheus.exposition, gateways, self.node, workers, self.health.memory.nodes)

    def _waiting(self) -> dict[str, dict[str, int]]:
        """Requests that wait here, by model and account."""
        return {m.id: self.engine.dispatcher(m).lengths() for m in self.models if self.engine.serves(m)}

    def _load(self, process: str, report: LoadReport | None) -> None:
        if report is None:
            for model in self.models:
                if self.engine.serves(model):
                    self.engine.lost(model, process)
        elif (told := self.models.started.get(report.model)) is not None and self.engine.serves(told):
            self.engine.dispatcher(told).report(process, report)

    def _desk(self, model: str) -> Desk | None:
        """Where other gateways get the turns of their requests for ``model``, if it is served here."""
        told = self.models.started.get(model)
        return self.engine.dispatcher(told).desk() if told is not None and self.engine.serves(told) else None

    def backend(self, model: ServedModel) -> Backend:
        """What answers the model's generation requests."""
        return self.backends.get(model.id, self.engine)

    @property
    def known(self) -> Known:
        """For who checks requests of batches."""

        def allow(caller: Caller, model: ServedModel) -> None:
            paid = bool(model.record.properties.require_workers_paid)
            self.state.allowance.check_plan(caller, model.id, paid=paid)

        most = self.settings.batch_max_requests
        version = partial(canary.for_batch, self.models)
        return Known(self.models.named, self.limits, allow, self.settings, most, self.adapters.kept, version)

    def limits(self, model: ServedModel) -> ModelLimits:
        """Bounds and defaults that bodies for the model are read with; the defaults for one that generates nothing."""
        generates = model.id in self.backends or self.engine.serves(model)
        return self.backend(model).limits(model) if generates else ModelLimits()

    async def run(
        self, name: str, body: Body, caller: Caller, *, headers: Headers = _NONE, model: ServedModel | None = None
    ) -> Answer | Streamed:
        """The native call. ``model``: which version of the one called ``name``."""
        if model is None:
            model = up(canary.version(self.models, self.models.named(name), name, body.json, headers, caller), name)
        task = tasks()[model.record.task]
        if body.json:
            body = replace(body, json=with_lora(body.json, name))
        request = with_headers(task.read(body, model, self.limits(model)), headers)
        return await task.answer(self.runtime, model, request, await self.perform(model, request, caller))

    async def perform(self, model: ServedModel, request: TaskRequest, caller: Caller) -> Any:
        """What comes of a request in whatever dialect; see its task's ``run``. Raises `Estimated` for one that only
        asks what it would cost.
        """
        if request.estimate:
            raise Estimated(await self.estimate(model, [request], caller))
        canary.name_answer(self.models, model, request)
        run, log_it = tasks()[model.record.task].run, self.prompt_log
        if not log_it.wanted(caller):
            return await run(self.runtime, model, request, caller)
        own_id = request_id.current.get()
        try:
            answer = await run(self.runtime, model, request, caller)
        except Exception as error:
            log_it.refused(own_id, caller, model, request, error)
            raise
        return log_it.watched(own_id, caller, model, request, answer)

    async def estimate(self, model: ServedModel, requests: Sequence[TaskRequest], caller: Caller) -> Estimate:
        """What the pieces of work of one request would use and cost together, and when they would begin."""
        task = tasks()[model.record.task]
        return together([await task.estimate(self.runtime, model, request, caller) for request in requests])

    async def generate(self, model: ServedModel, request: GenerateRequest, caller: Caller) -> AsyncIterator[Event]:
        """The events of a generation request; its prompt has been checked when this returns."""
        events, _ = await self.perform(model, request, caller)
        return events

    def waiting(self, model: ServedModel) -> Callable[[], str]:
        """Says what a request waits for while its model starts: see :func:`streams.streamed`."""
        return partial(self.health.memory.waiting, model.id, partial(self.backend(model).waiting, model))

    async def count_tokens(self, model: ServedModel, request: GenerateRequest, caller: Caller) -> int:
        """How many tokens the request's prompt has, whether or not the context window would take it."""
        return await self.backend(model).count_tokens(model, request, self.runtime.salt(caller.account))

    async def run_handle(self, name: str, inputs: dict[str, Any], own_id: str = "") -> dict[str, Any]:
        """:meth:`run` for the Python handle: the envelope, errors included (with their ``status``). ``own_id``: what a
        caller that may ask again calls the request; it is charged once under it.
        """
        own_id = own_id or secrets.token_hex(16)
        request_id.current.set(own_id)
        try:
            result = await self.run(name, Body({**check_object(inputs), "stream": False}), self.own(), headers=_JSON)
        except Estimated as asked:
            return success(asked.estimate.shown())
        except Exception as error:
            return self.failure(error, own_id)
        assert isinstance(result, Answer)
        return result.body

    async def stream_handle(self, name: str, inputs: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """:meth:`run` as a stream of native frames; an error is the last frame."""
        own_id = secrets.token_hex(16)
        request_id.current.set(own_id)
        try:
            result = await self.run(name, Body({**check_object(inputs), "stream": True}), self.own(), headers=_JSON)
            if isinstance(result, Answer):
                yield result.body["result"]
                return
            async for frame in result.values(result.events):
                yield frame
        except Estimated as asked:
            yield asked.estimate.shown()
        except Exception as error:
            yield self.failure(error, own_id)

    def own(self) -> Caller:
        """Whoever can call the handle holds the cluster's token, and acts for the account of the settings."""
        return self.state.accounts.own()

    def failure(self, error: Exception, request_id: str) -> dict[str, Any]:
        """An error as the Python handle gets it."""
        shown = as_api_error(error, request_id)
        if shown is not error:
            log.error("request %s failed", request_id, exc_info=error)
        return {**envelope(shown), "status": shown.status}
