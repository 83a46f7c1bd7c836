"""Small fleets for the tests of the router and what sits on it."""

from hashlib import sha256

from serve_app.routing.costs import CostModel
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.prices import RouterConfig
from serve_app.routing.router import Router
from serve_app.routing.types import RouteRequest, WorkerLoad

CHUNK = 256


def keys(talk: int, tokens: int) -> list[bytes]:
    return [sha256(b"%d %d" % (talk, at)).digest() for at in range(tokens // CHUNK)]


def load(name: str, role: str = "mixed", node: str = "n0", at: float = 0.0, **more) -> WorkerLoad:
    fields = {"max_seqs": 64, "kv_blocks_total": 40_000, "max_batch_tokens": 4096, **more}
    return WorkerLoad(name, node, role, reported_at=at, **fields)  # type: ignore[arg-type]


def router(*loads: WorkerLoad, **config) -> Router:
    made = Router(CostModel(), LocalityIndex(10_000), RouterConfig(chunk_tokens=CHUNK, jitter=0.0, **config))
    for one in loads:
        made.report(one)
    return made


def request(name: str = "r", prompt: int = 2000, talk: int | None = None, **more) -> RouteRequest:
    return RouteRequest(name, prompt, keys(talk, prompt) if talk is not None else (), **more)
