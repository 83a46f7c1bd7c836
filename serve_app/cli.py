"""``serve-app``: serve, models, run, dashboard, accounts, db, webhooks, usage, batch, lora, status, config,
train-draft, train-lora and bench.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from serve_app.batch_command import add_parser as add_batch_parser
from serve_app.catalog.errors import CatalogError
from serve_app.config import ConfigError, api_key, load_settings
from serve_app.dashboard_command import add_parser as add_dashboard_parser
from serve_app.distill.command import add_parser as add_train_draft
from serve_app.finetune.command import add_parser as add_train_lora
from serve_app.lora_command import add_parser as add_lora_parser
from serve_app.state.account_commands import add_accounts_parser
from serve_app.state.commands import add_database_parser
from serve_app.state.errors import StateError
from serve_app.state.webhook_commands import add_webhooks_parser
from serve_app.usage_command import add_parser as add_usage_parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.command(arguments)
    except (ConfigError, CatalogError, StateError) as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-app", description="A self-hosted Workers AI on Ray Serve.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start everything on this machine; Ctrl-C ends it")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000, or $PORT)")
    serve.add_argument("--profile", choices=("local", "gpu"), help="which serving options of the catalogue to use")
    serve.add_argument("--models", help="comma-separated model ids (default: all of the profile)")
    serve.set_defaults(command=_serve)

    models = commands.add_parser("models", help="list the catalogue")
    models.add_argument("--profile", choices=("local", "gpu"), help="only what this profile starts")
    models.set_defaults(command=_models)

    run = commands.add_parser("run", help="run a model of the running server and print what it answers")
    run.add_argument("model", help="model id, e.g. @cf/pico/pico-instruct")
    run.add_argument("prompt", help="the prompt, or - to read it from standard input")
    run.add_argument("--max-tokens", type=int, help="most tokens to generate")
    run.add_argument("--temperature", type=float, help="0 for the most likely answer")
    run.add_argument("--raw", action="store_true", help="send the prompt without the model's chat template")
    run.add_argument("--json", action="store_true", help="print the whole result as JSON instead of streaming text")
    run.set_defaults(command=_run)

    add_dashboard_parser(commands)
    add_accounts_parser(commands)
    add_database_parser(commands)
    add_webhooks_parser(commands)

    add_usage_parser(commands)
    add_batch_parser(commands)
    add_lora_parser(commands)

    status = commands.add_parser("status", help="show the running server's models and workers as JSON")
    status.set_defaults(command=_status)

    config = commands.add_parser("config", help="print a profile's Serve config, for `serve deploy` on a cluster")
    config.add_argument("profile", choices=("local", "gpu"), help="which serving options of the catalogue to use")
    config.add_argument("--models", help="comma-separated model ids (default: all of the profile)")
    config.set_defaults(command=_config)

    add_train_draft(commands)
    add_train_lora(commands)

    bench = commands.add_parser("bench", help="run one of the project's benchmarks", add_help=False)
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="name and options; `bench --help` lists them")
    bench.set_defaults(command=_bench)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    settings = load_settings(
        host=arguments.host, port=arguments.port, profile=arguments.profile, models=arguments.models
    )
    from serve_app.serving import serve_until_interrupted

    return serve_until_interrupted(settings)


def _models(arguments: argparse.Namespace) -> int:
    from serve_app.catalog.load import load_catalog

    settings = load_settings()
    for record in load_catalog(settings.home):
        if arguments.profile is None or arguments.profile in record.serving:
            profiles = ",".join(record.serving) or "-"
            print(f"{record.id:48} {record.task:16} {profiles:10} {record.description}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    import json

    from serve_app.binding import AI, AIError
    from serve_app.cluster import NotRunning

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    inputs: dict[str, Any] = {"prompt": prompt, "raw": arguments.raw or None, "max_tokens": arguments.max_tokens}
    inputs = {k: v for k, v in {**inputs, "temperature": arguments.temperature}.items() if v is not None}
    try:
        ai = AI()
        if arguments.json:
            print(json.dumps(ai.run(arguments.model, inputs), indent=2))
            return 0
        for event in ai.run(arguments.model, {**inputs, "stream": True}):
            print(event.get("response") or "", end="", flush=True)
        print()
        return 0
    except (AIError, NotRunning) as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1


def _status(arguments: argparse.Namespace) -> int:
    import httpx

    from serve_app.cluster import NotRunning, read_attachment

    settings = load_settings()
    try:
        url = read_attachment(settings.home).url
    except NotRunning as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    answer = httpx.get(f"{url}/v1/status", headers={"Authorization": f"Bearer {api_key(settings)}"}, timeout=30)
    print(answer.text)
    return 0 if answer.is_success else 1


def _config(arguments: argparse.Namespace) -> int:
    from serve_app.catalog.load import load_catalog
    from serve_app.serve_config import render

    settings = load_settings(profile=arguments.profile, models=arguments.models)
    print(render(settings, load_catalog(settings.home)), end="")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import subprocess

    root = Path(__file__).resolve().parents[1]
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments.arguments], cwd=root)


if __name__ == "__main__":
    sys.exit(main())
