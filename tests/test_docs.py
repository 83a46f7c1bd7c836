"""The documents say what the code says: snippets compile, names exist, codes agree, links lead somewhere."""

import argparse
import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from starlette.routing import Route

from serve_app.api import adapter_errors, errors
from serve_app.catalog.records import ModelRecord, Profile, Stage
from serve_app.cli.program import parser
from serve_app.config import ENVIRONMENT, Settings
from serve_app.ray_private import environment as env

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    "README.md",
    "docs/architecture.md",
    "docs/cache.md",
    "docs/engine.md",
    "docs/parallel.md",
    "docs/routing.md",
    "docs/scale.md",
    "docs/operations.md",
    "docs/gpu.md",
    "docs/api.md",
    "docs/security.md",
    "docs/batch.md",
    "docs/state.md",
    "docs/tasks.md",
    "docs/ledger.md",
    "docs/lora.md",
    "docs/dashboard.md",
    "CONTRIBUTING.md",
]
# Read by kernels, which know no settings.
KERNEL_VARIABLES = {"SERVE_APP_FLASH_ATTENTION"}
# Read by what we build on, not by us.
FOREIGN_VARIABLES = {
    "SERVE_APP_ZONE",
    "SERVE_APP_NEIGHBOUR_KEY_PARIS",
    "RAY_REDIS_ADDRESS",
    "HF_TOKEN",
    "HF_HOME",
    "HF_ENDPOINT",
    "CXX",
    "RAY_ADDRESS",
    "KEY",
    "AI",
}


@cache
def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def fences(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(document), re.M | re.S)


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, its head left out."""
    behind = text(document).split(f"{heading}\n", 1)[1]
    found = []
    for line in behind.splitlines():
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found:
            break
    return found[2:]


def ticked(words: str) -> list[str]:
    """What stands in backticks, fenced blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", words, flags=re.M | re.S))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_snippets_compile(document: str) -> None:
    for number, snippet in enumerate(fences(document, "python")):
        compile(snippet, f"{document}, snippet {number + 1}", "exec")


def test_the_readme_has_a_snippet_for_every_way_in() -> None:
    snippets = "\n".join(fences("README.md", "python") + fences("README.md", "bash"))
    ways = ("from openai import", "from cloudflare import", "import AI\n", "import AsyncAI", "curl ", "serve-app run")
    assert [way for way in ways if way not in snippets] == []


def test_records_in_the_readme_are_accepted() -> None:
    records = [yaml.safe_load(snippet) for snippet in fences("README.md", "yaml")]
    assert len(records) == 2
    for record in records:
        ModelRecord.model_validate(record)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.M))
    commands = "\n".join([*ticked(text(document)), *fences(document, "bash"), *_indented(document)])
    named = set(re.findall(r"(?:^|[ ;&])make ([a-z-]+)", commands, re.M))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_subcommands_and_their_options_exist(document: str) -> None:
    [subparsers] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    commands = "\n".join([*ticked(text(document)), *fences(document, "bash"), *_indented(document)])
    for name, rest in re.findall(r"serve-app (?!-)([\w-]+)([^\n'`]*)", commands):
        assert name in subparsers.choices, f"{document}: serve-app {name}"
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", rest):
            assert option in _options(subparsers.choices[name], rest), f"{document}: serve-app {name} {option}"


def _options(parser: argparse.ArgumentParser, rest: str) -> set[str]:
    """Options of a command, or of the one of its own commands that ``rest`` begins with."""
    for action in parser._actions:
        # Of some commands an action may be left out.
        if isinstance(action, argparse._SubParsersAction) and (action.required or rest.split()[0] in action.choices):
            return set(action.choices[rest.split()[0]]._option_string_actions)
    return set(parser._option_string_actions)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_environment_variables_exist(document: str) -> None:
    known = set(ENVIRONMENT) | set(env.serving_env()) | FOREIGN_VARIABLES | KERNEL_VARIABLES | {"SERVE_APP_HOME"}
    named = set(re.findall(r"\b(?:SERVE_APP|RAY|HF)_[A-Z][A-Z_]*[A-Z]\b", text(document)))
    assert named <= known


def test_the_table_of_settings_is_complete() -> None:
    table = rows("README.md", "## Settings")
    variables = {name for row in table for name in ticked(row[0])}
    assert variables == set(ENVIRONMENT) | {"SERVE_APP_HOME"}
    for row in table[1:]:
        [setting] = ticked(row[1])
        assert {ENVIRONMENT[name] for name in ticked(row[0])} == {setting}
        if ticked(row[2]):
            assert ticked(row[2]) == [str(Settings.model_fields[setting].default)]


def _indented(document: str) -> list[str]:
    return re.findall(r"^    (\S.*)$", text(document), re.M)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_the_project_exist(document: str) -> None:
    tops = {path.name for path in ROOT.iterdir()} - {".git"}
    missing = []
    for word in ticked(text(document)) + re.findall(r"^    ([\w./]+)  ", text(document), re.M):
        path = word.split("#")[0].rstrip("/")
        inside = path.split("/")[0] in tops and "/" in path
        if re.fullmatch(r"[\w./-]+", path) and inside and not path.startswith(".venv") and not (ROOT / path).exists():
            missing.append(word)
    assert missing == []


def test_every_promise_of_security_names_tests_that_exist() -> None:
    promises = re.findall(r"^\| (?!promise|---)(.+) \| (.*) \|$", text("docs/security.md"), re.M)
    assert len(promises) > 20
    for promise, named in promises:
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", named)
        assert tests, f"no test shows it: {promise}"
        for file, function in tests:
            assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{promise}: {file}::{function}"


def test_proofs_of_security_that_not_every_run_has_are_marked() -> None:
    for file, function, note in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`( \([^)]*\))?", text("docs/security.md")):
        tree = ast.parse((ROOT / file).read_text())
        [found] = [node for node in ast.walk(tree) if getattr(node, "name", "") == function]
        marks = [ast.unparse(mark) for mark in found.decorator_list]
        if "pytest.mark.slow" in marks:
            assert note.startswith(" (slow"), f"{file}::{function} is slow"
        elif any("pytest.mark.slow" in mark or "some(" in mark for mark in marks):
            assert note.startswith(" (partly slow"), f"{file}::{function} is partly slow"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_names_of_ours_exist(document: str) -> None:
    for name in re.findall(r"`(serve_app(?:\.\w+)+)`", text(document)):
        parts = name.split(".")
        module = ROOT.joinpath(*parts)
        owner = ROOT.joinpath(*parts[:-1]).with_suffix(".py")
        defined = owner.exists() and re.search(rf"^(class|def) {parts[-1]}\b", owner.read_text(), re.M)
        assert module.is_dir() or module.with_suffix(".py").exists() or defined, f"{document}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(document)):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert fragment in {anchor(heading) for heading in headings}, f"{document}: {target}"


def test_the_error_codes_are_those_of_the_code() -> None:
    def all_of(cls: type[errors.ApiError]) -> set[tuple[int, int]]:
        return {(cls.code, cls.status)}.union(*(all_of(below) for below in cls.__subclasses__()))

    assert issubclass(adapter_errors.NoAdapter, errors.ApiError)
    documented = [(int(row[0]), int(row[1])) for row in rows("docs/api.md", "## Errors")]
    assert len(documented) == len(set(documented))
    assert set(documented) == all_of(errors.ApiError)
    assert all(row[2] and row[3] for row in rows("docs/api.md", "## Errors"))


ACCOUNT = "/client/v4/accounts/{account}"
# The same routes under several prefixes are documented once, under the account.
ALIASES = re.compile(
    r"^(/v1/\{account\}/\{gateway\}/(workers-ai/v1|compat)|/client/v4/accounts/\{account\}/ai(/v1)*|/v1)"
    r"(?=/(audio|chat/completions|completions|embeddings|images|models|responses|conversations|messages)(/|$))(?!/models/(search|schema|records|actions))"
)
# Files and batches of OpenAI's have one of their own beside our own batches.
BATCHES = re.compile(r"^(/v1/\{account\}/\{gateway\}/(workers-ai/v1|compat)|/v1)(?=/(files|batches)(/|$))")
OWN = re.compile(r"^/v1(?=/requests(/|$))")


def canonical(path: str) -> str:
    path = re.sub(r"^/(v1/|v2/)?(rerank|score)$", lambda m: f"{ACCOUNT}/ai/{m[1] or 'v1/'}{m[2]}", path)
    path = re.sub(rf"^{re.escape(ACCOUNT)}(?=/tokens(/|$))", "/client/v4/user", path)
    path = re.sub(r"^/v1(?=/(organization/|estimate$))", f"{ACCOUNT}/ai/v1", path)
    path = BATCHES.sub(f"{ACCOUNT}/ai/v1", ALIASES.sub(f"{ACCOUNT}/ai/v1", path))
    return OWN.sub(f"{ACCOUNT}/ai", path)


def test_the_routes_are_those_of_the_gateway(tmp_path: Path) -> None:
    from serve_app.gateway.core import Gateway
    from serve_app.gateway.http.app import build_http
    from serve_app.gateway.settings import GatewaySettings

    settings = GatewaySettings("local", (), "00" * 32, str(tmp_path), "local")
    application = build_http(Gateway(settings, lambda model, method, wire: None))
    served = {
        (method, canonical(re.sub(r":path", "", route.path)))
        for route in application.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {tuple(word.split(" ", 1)) for row in rows("docs/api.md", "## Routes") for word in ticked(row[0])[:1]}
    assert documented == served


def test_the_request_fields_are_those_of_the_schema() -> None:
    from serve_app.tasks.registry import tasks

    fields = {name for row in rows("docs/api.md", "## Text generation") for name in ticked(row[0])}
    forms = tasks()["text-generation"].schema()["input"]["oneOf"]
    decisions = [form for form in forms if form["title"] == "Decisions"]
    assert {name for form in forms if form not in decisions for name in form["properties"]} <= fields
    section = text("docs/api.md").split("\n## Decisions\n")[1].split("\n## ")[0]
    assert [name for name in decisions[0]["properties"] if f'"{name}"' not in section] == []
    listed = {name for row in rows("docs/api.md", "## Embeddings") for name in ticked(row[0])}
    forms = tasks()["text-embeddings"].schema()["input"]["oneOf"]
    assert {name for form in forms for name in form["properties"]} == listed


def test_what_is_refused_is_documented() -> None:
    from serve_app.api.fields.sampling import _UNSUPPORTED

    section = text("docs/api.md").split("## Not supported yet")[1]
    assert {name for name in _UNSUPPORTED if f"`{name}`" not in section} <= {"image", "audio"}


def test_the_fields_of_a_stage_are_documented() -> None:
    listed = {name for row in rows("docs/operations.md", "### Autoscaling") for name in ticked(row[0])}
    assert listed == set(Stage.model_fields)
    assert "min_remote_prefill_tokens" in Profile.model_fields


def test_messages_in_the_troubleshooting_table_are_real() -> None:
    """Each message occurs in the sources, but for what Ray says itself. Strings may be broken over lines there."""
    files = [*(ROOT / "serve_app").rglob("*.py"), *(ROOT / "deployments").rglob("*.py"), ROOT / "Makefile"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    wrong = []
    for row in rows("docs/operations.md", "## Troubleshooting"):
        if "from Ray" in row[0]:
            continue
        for message in ticked(row[0]):
            for part in re.split(r"\.\.\.|%s|local", message):
                if len(part.strip()) > 3 and part.strip() not in joined and part.strip().lower() not in joined:
                    wrong.append(part.strip())
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_mark_was_left_behind(document: str) -> None:
    assert not re.search(r"TODO|FIXME|XXX|@[A-Z]+@|\?\?\?", text(document))


def test_the_cluster_file_names_the_config_that_ships() -> None:
    for document in ("cluster.yaml", "README.md", "docs/operations.md"):
        [name] = set(re.findall(r"serve deploy (\S+\.yaml)", text(document)))
        assert (ROOT / name).is_file()
