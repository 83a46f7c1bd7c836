"""Who may import whom. Every import counts, those inside functions too; only `if TYPE_CHECKING:` blocks do
not.

Two kinds of rule: what a package itself may name, and what may never be reached from it through our own
modules.
"""

import ast
import re
import subprocess
import sys

import pytest

from tests.imports import FILES, MODULES, ROOT, Imports, chain_to, imports_of, room, within
from tests.variants import some

HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "requests", "aiohttp"}

TASKS = sorted(path.parent.name for path in (ROOT / "serve_app" / "tasks").glob("*/declaration.py"))
TASK_WORKERS = {f"serve_app.tasks.{path.parent.name}.worker" for path in (ROOT / "serve_app/tasks").glob("*/worker.py")}

# Package -> the packages and distributions it may name (itself and the standard library go without saying).
# "serve_app.x.y" allows one module, "serve_app.x" the package.
MAY_IMPORT: dict[str, set[str]] = {
    "serve_app.api": {"numpy", "orjson", "serve_app.sampling_params"},
    "serve_app.text": {"jinja2", "numpy", "tokenizers", "serve_app.api", "serve_app.sampling_params"},
    "serve_app.catalog": {"huggingface_hub", "pydantic", "yaml"},
    "serve_app.channel": {"msgspec", "serve_app.wire"},
    "serve_app.wire": {"msgspec", "serve_app.sampling_params"},
    # Files of strangers: nothing of ours but this is in the process that reads them.
    "serve_app.media": {"av", "numpy", "PIL"},
    "serve_app.documents": {"markitdown", "serve_app.media.preparing"},
    "serve_app.predict": {
        "diffusers", "numpy", "PIL", "torch", "transformers", "serve_app.engine.batching", "serve_app.kernels.linear",
        "serve_app.media", "serve_app.text.tiles",
    },
    "serve_app.worker": {
        "serve_app.sampling_params",
        "msgspec", "numpy", "torch", "serve_app.adapters", "serve_app.catalog", "serve_app.channel",
        "serve_app.engine", "serve_app.grammar", "serve_app.state.blobs.adapters", "serve_app.state.blobs.files",
        "serve_app.kv", "serve_app.logs", "serve_app.media.preparing", "serve_app.models", "serve_app.parallel",
        "serve_app.predict",
        "serve_app.progress", "serve_app.wire",
    },
    "serve_app.worker.spec": set(),
    "serve_app.worker.birth": {"serve_app.logs", "serve_app.progress", "serve_app.worker.spec"},
    "serve_app.kernels": {"numpy", "torch", "triton"},
    "serve_app.costs": {"numpy"},
    "serve_app.engine": {
        "numpy", "torch", "serve_app.sampling_params",
        "serve_app.costs", "serve_app.kernels", "serve_app.kv.keys", "serve_app.kv.chunk", "serve_app.kv.parts",
        "serve_app.wire.parts",
    },
    # What ranks say and compute together; a model's part is read in serve_app.models.divided.
    "serve_app.parallel": {
        "msgspec", "numpy", "torch", "serve_app.activity", "serve_app.costs", "serve_app.engine",
        "serve_app.kernels.library.load", "serve_app.kv.parts", "serve_app.wire.message", "serve_app.wire.parts",
        "serve_app.wire.ranks",
    },
    "serve_app.parallel.place": set(),
    "serve_app.parallel.dispatch": set(),
    "serve_app.parallel.stages": set(),
    "serve_app.grammar": {"llguidance", "numpy", "serve_app.api", "serve_app.engine.constrain", "serve_app.text"},
    "serve_app.models": {
        "serve_app.sampling_params",
        "numpy", "safetensors", "torch", "transformers", "serve_app.adapters", "serve_app.engine",
        "serve_app.kernels", "serve_app.parallel", "serve_app.sealed", "serve_app.wire.ranks",
    },
    "serve_app.adapters": {"numpy", "safetensors", "torch", "serve_app.sealed"},
    # What an upload is checked with, in processes without torch.
    "serve_app.adapters.config": set(),
    "serve_app.adapters.shapes": {"serve_app.sealed"},
    "serve_app.adapters.mixture": {"serve_app.adapters.config"},
    "serve_app.adapters.check": {
        "numpy", "serve_app.adapters.config", "serve_app.adapters.mixture", "serve_app.adapters.shapes",
    },
    "serve_app.distill": {
        "serve_app.sampling_params",
        "numpy", "safetensors", "torch", "transformers", "serve_app.catalog", "serve_app.config", "serve_app.engine",
        "serve_app.models", "serve_app.text",
    },
    "serve_app.finetune": {
        "numpy", "peft", "torch", "transformers", "serve_app.adapters", "serve_app.api", "serve_app.client",
        "serve_app.distill", "serve_app.models", "serve_app.text",
    },
    "serve_app.client": {"httpx", "serve_app.cluster", "serve_app.config"},
    "serve_app.planning": {
        "huggingface_hub", "torch", "transformers", "yaml", "serve_app.catalog", "serve_app.costs.stages",
        "serve_app.costs.states", "serve_app.models.divided.division", "serve_app.models.encoding",
        "serve_app.models.linears", "serve_app.models.loading.folder", "serve_app.models.loading.stored",
        "serve_app.models.needs", "serve_app.models.quantization", "serve_app.models.stateful",
        "serve_app.parallel.dispatch", "serve_app.parallel.place", "serve_app.parallel.stages",
    },
    "serve_app.kv": {
        "msgspec", "numpy", "ray", "serve_app.costs", "serve_app.logs", "serve_app.ray_private.fork_server",
        "serve_app.ray_private.node_actors", "serve_app.wire",
    },
    "serve_app.kv.keys": {"numpy"},
    "serve_app.routing": {"numpy", "serve_app.costs"},
    "serve_app.state": {
        "alembic", "botocore", "fsspec", "msgspec", "orjson", "s3fs", "sqlalchemy", "yaml", "serve_app.api.errors",
        "serve_app.api.trace_context", "serve_app.catalog.operated",
        "serve_app.config",
    },
    # What a gateway has in memory knows no database.
    "serve_app.state.callers.accounts": {"serve_app.state.errors", "serve_app.state.callers.limits"},
    "serve_app.state.callers.limits": {"serve_app.state.errors"},
    "serve_app.state.callers.book": {"serve_app.state.callers.accounts"},
    "serve_app.state.callers.audit": set(),
    "serve_app.state.protocols": {
        "serve_app.state.callers.accounts", "serve_app.state.callers.audit", "serve_app.state.deferred.events",
        "serve_app.state.spending.quotas",
        "serve_app.state.kept.streams",
    },
    "serve_app.state.kept.streams": set(),
    "serve_app.catalog.operated": set(),
    "serve_app.state.deferred.batches": {"msgspec", "serve_app.state.callers.accounts", "serve_app.state.protocols"},
    "serve_app.config": {
        "pydantic", "yaml", "serve_app.catalog", "serve_app.ray_private.environment", "serve_app.setting_values",
    },
    "serve_app.ray_private": {"ray"},
    "serve_app.ray_private.environment": set(),
    "serve_app.tasks": {
        "msgspec", "numpy", "orjson", "serve_app.api", "serve_app.catalog", "serve_app.media.encoding",
        "serve_app.media.limits", "serve_app.state",
        "serve_app.text", "serve_app.wire",
    },
    # Of Ray, only what Serve says of its applications (health.py); of HTTP's clients, what webhooks need (webhooks.py).
    "serve_app.gateway": {
        "graphql", "httpx", "msgspec", "numpy", "opentelemetry", "orjson", "prometheus_client", "starlette",
        "serve_app.adapters.check",
        "serve_app.adapters.config", "serve_app.adapters.shapes", "serve_app.api", "serve_app.batch",
        "serve_app.catalog",
        "serve_app.channel", "serve_app.costs", "serve_app.dashboard", "serve_app.documents",
        "serve_app.grammar.answer",
        "serve_app.grammar.check",
        "serve_app.kv.keys",
        "serve_app.kv.cached_tokens", "serve_app.logs", "serve_app.media", "serve_app.progress", "serve_app.routing",
        "serve_app.ray_private.status", "serve_app.sampling_params",
        "serve_app.state", "serve_app.tasks", "serve_app.text", "serve_app.wire",
    },
    "serve_app.dashboard": {"starlette", "serve_app.api.errors"},
    # Batches need no HTTP: what runs one request is handed to them.
    "serve_app.batch": {
        "msgspec", "numpy", "orjson", "serve_app.api", "serve_app.catalog", "serve_app.state", "serve_app.tasks",
        "serve_app.text",
    },
    # Of OpenTelemetry, what `requirements/runtime.in` has; the exporter is an extra.
    "serve_app.gateway.tracing": {
        "opentelemetry", "serve_app.api.trace_context", "serve_app.catalog.tasks", "serve_app.state.kept.traces",
    },
    # Running streams again needs no HTTP.
    "serve_app.gateway.resume": {"msgspec", "serve_app.api", "serve_app.state", "serve_app.wire"},
    "serve_app.gateway.dispatch": {
        "msgspec", "numpy", "serve_app.api", "serve_app.catalog", "serve_app.channel", "serve_app.costs",
        "serve_app.gateway.models", "serve_app.routing", "serve_app.state", "serve_app.tasks", "serve_app.wire",
    },
    # What the catalogue reads of a task.
    **{f"serve_app.tasks.{task}.declaration": {"serve_app.catalog.tasks"} for task in TASKS},
    # What a task's worker does is loaded by its worker alone.
    **{module: {"numpy", "torch", "transformers", "serve_app.predict"} for module in TASK_WORKERS},
}  # fmt: skip

# Package -> distributions that must not be reached from it, however far away.
MUST_NOT_REACH: dict[str, set[str]] = {
    "serve_app.api": {"ray", "torch", "transformers"},
    "serve_app.text": {"ray", "torch", "transformers"},
    "serve_app.catalog": {"ray", "torch", "transformers"},
    "serve_app.tasks": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.channel": {"ray", "torch", "transformers"},
    "serve_app.wire": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.media": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.documents": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.predict": {"ray"} | HTTP,
    "serve_app.worker": HTTP,
    "serve_app.kernels": {"ray", "transformers"} | HTTP,
    "serve_app.engine": {"ray", "transformers"} | HTTP,
    "serve_app.adapters": {"ray", "transformers"} | HTTP,
    "serve_app.adapters.config": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.adapters.mixture": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.adapters.check": {"ray", "torch", "transformers"} | HTTP,
    "serve_app.models": {"ray"} | HTTP,
    "serve_app.parallel": {"ray", "transformers"} | HTTP,
    "serve_app.distill": {"ray"},
    "serve_app.grammar.answer": {"ray", "torch", "transformers"},
    "serve_app.grammar.check": {"ray", "torch", "transformers"},
    "serve_app.grammar.rules": {"ray", "torch", "transformers"},
    "serve_app.grammar.schema": {"ray", "torch", "transformers"},
    "serve_app.gateway": {"torch", "transformers"},
    "serve_app.kv": {"torch", "transformers"},
    "serve_app.state": {"ray", "torch", "transformers"} | HTTP,
}

# Serve replicas stay light; what needs torch runs in actors of its own, whose modules these import only by
# name.
REPLICA_MODULES = ("deployments.gateway", "deployments.batch", "deployments.decode", "deployments.prefill",
                   "deployments.draft", "deployments.single_stage", "deployments.embeddings", "deployments.reranker",
                   "deployments.predictor", "deployments.stage")  # fmt: skip


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_names_only_what_it_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package, "serve_app"}
    wrong = []
    for module in MODULES:
        if not within(module, package) or (module in TASK_WORKERS and module != package):
            continue
        for name in sorted(imports_of(module)[0] | imports_of(module)[1]):
            standard = name.split(".")[0] in sys.stdlib_module_names
            if (
                not standard
                and name != "serve_app"
                and not any(within(name, permitted) for permitted in allowed - {"serve_app"})
            ):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("package", MUST_NOT_REACH)
def test_a_package_does_not_reach(package: str) -> None:
    modules = [module for module in MODULES if within(module, package) and module not in TASK_WORKERS]
    chains = [chain_to(module, MUST_NOT_REACH[package], lazy=True) for module in modules]
    assert [" -> ".join(chain) for chain in chains if chain] == []


def test_serve_replicas_import_neither_torch_nor_transformers() -> None:
    present = [module for module in REPLICA_MODULES if module in MODULES]
    assert present
    chains = [chain_to(module, {"torch", "transformers"}, lazy=False) for module in present]
    assert [" -> ".join(chain) for chain in chains if chain] == []


def test_nothing_below_imports_the_deployments() -> None:
    above = {"serve_app.app", "serve_app.cli", "serve_app.binding"}
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, "serve_app") and not any(within(module, top) for top in above)
        for name in imports_of(module)[0] | imports_of(module)[1]
        if name.split(".")[0] in ("deployments", "training", "benchmarks", "tests")
    ]
    assert wrong == []


def test_every_room_has_an_arrow() -> None:
    """What stands above the others may name all of them; each other folder of serve_app says what it may name."""
    above = {"serve_app.app", "serve_app.bound", "serve_app.binding", "serve_app.cli", "serve_app.cluster"}
    above |= {"serve_app.serving", "serve_app.serve_config", "serve_app.kubernetes", "serve_app.dashboard_command"}
    above |= {"serve_app.clouds", "serve_app.small_machine"}
    leaves = {
        "serve_app.activity",
        "serve_app.inner_ports",
        "serve_app.lean_torch",
        "serve_app.logs",
        "serve_app.memory",
        "serve_app.progress",
        "serve_app.run_directory",
        "serve_app.sampling_params",
        "serve_app.sealed",
        "serve_app.setting_values",
    }
    rooms = {room(module) for module in MODULES if within(module, "serve_app") and module != "serve_app"}
    assert rooms - above - leaves == set(MAY_IMPORT) & rooms
    for leaf in leaves:
        named = imports_of(leaf)[0] | imports_of(leaf)[1]
        assert not {name for name in named if within(name, "serve_app") and name != "serve_app"}, leaf


def circles(edges: dict[str, set[str]]) -> dict[str, list[str]]:
    """What is left when all that needs nothing that is left has been taken away, again and again."""
    while free := [name for name, needs in edges.items() if not needs & set(edges)]:
        for name in free:
            del edges[name]
    return {name: sorted(needs & set(edges)) for name, needs in edges.items()}


def test_rooms_import_in_one_direction() -> None:
    edges: dict[str, set[str]] = {room(module): set() for module in MODULES if within(module, "serve_app")}
    for module in MODULES:
        for name in imports_of(module)[0] | imports_of(module)[1]:
            if within(module, "serve_app") and room(name) in edges and room(name) != room(module):
                edges[room(module)].add(room(name))
    edges.pop("serve_app")
    assert circles(edges) == {}


def test_modules_import_in_one_direction() -> None:
    """Inside rooms as well, and inside functions: what two modules need of each other belongs to a third."""
    edges = {module: set().union(*imports_of(module)) - {module} for module in MODULES}
    edges.pop("serve_app")  # what it has for users is found when they ask for it
    assert circles(edges) == {}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a": ["b"], "b": ["c"], "c": ["b"]}


def test_folders_side_by_side_import_in_one_direction() -> None:
    pairs: set[tuple[str, str]] = set()
    for module in (name for name in MODULES if within(name, "serve_app")):
        for name in set().union(*imports_of(module)) & MODULES.keys():
            here, there = (folder(each).split(".") for each in (module, name))
            same = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if same is not None:
                pairs.add((".".join(here[: same + 1]), ".".join(there[: same + 1])))
    assert len(pairs) > 100
    assert {(a, b) for a, b in pairs if a < b and (b, a) in pairs} == set()


def folder(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_the_walk_sees_what_it_should() -> None:
    """The rules above are only as good as the walk: it must find an import inside a function and in a
    chain.
    """
    found = Imports("serve_app.x.y", is_package=False)
    code = "import os\nfrom . import z\ndef f():\n  import ray.serve\nif TYPE_CHECKING:\n  import torch\n"
    found.visit(ast.parse(code))
    assert found.eager == {"os", "serve_app.x"} and found.lazy == {"ray.serve"}
    assert chain_to("serve_app.models.load", {"transformers"}, lazy=True) is not None


# What Ray does not promise: tests/ray_private/test_contract.py says what breaks with each.
PRIVATE = re.compile(r"\bray\.(serve\.)?_\w+|\b_get_global_client\b|\bActorClassID\b")
VARIABLES = re.compile(r"\bRAY_SERVE_\w+")


def test_ray_s_private_names_lie_in_one_folder() -> None:
    rooms = {"serve_app/ray_private", "tests/ray_private", "tests/test_architecture.py"}
    found = []
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(room) for room in rooms):
            continue
        if name.startswith("tests/test_inner_"):  # another test's, gone in a moment
            continue
        text = path.read_text(encoding="utf-8")
        names = [match.group() for match in PRIVATE.finditer(text)]
        if not name.startswith("tests/"):
            names += VARIABLES.findall(text)
        if names:
            found.append(f"{name}: {names}")
    assert found == [], "move what needs them to serve_app/ray_private (tests: tests/ray_private/names.py)"


@pytest.mark.parametrize(
    "packages",
    some([["api"], ["text"], ["catalog"], ["engine", "kernels"]], ["api"], ["text"], ["catalog"]),
    ids="+".join,
)
def test_python_agrees(packages: list[str]) -> None:
    """The same asked of the interpreter, for what a real import loads."""
    names = {f"serve_app.{package}" for package in packages}
    modules = [name for name in MODULES if any(within(name, n) for n in names) and not name.endswith("__main__")]
    [forbidden] = {tuple(sorted(MUST_NOT_REACH[name] & {"ray", "torch", "transformers"})) for name in names}
    code = f"import sys, {', '.join(modules)}; print([n for n in {forbidden} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
