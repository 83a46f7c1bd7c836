"""The program: its commands, and how errors end it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from serve_app import clouds
from serve_app.catalog.errors import CatalogError
from serve_app.cli import accounts, batch, completion, database, lora, models, plan, run, status, top, usage, webhooks
from serve_app.cli.groups import add_command
from serve_app.cli.models import PROFILES
from serve_app.config import ConfigError, load_settings
from serve_app.dashboard_command import add_parser as add_dashboard
from serve_app.distill.command import add_parser as add_train_draft
from serve_app.finetune.command import add_parser as add_train_lora
from serve_app.state.errors import StateError


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = parser().parse_args(argv)
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


def parser() -> argparse.ArgumentParser:
    """Of all commands; imports nothing heavy."""
    found = argparse.ArgumentParser(prog="serve-app", description="A self-hosted Workers AI on Ray Serve.")
    commands = found.add_subparsers(required=True, metavar="COMMAND")

    serve = add_command(commands, "serve", "start everything on this machine; Ctrl-C ends it")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000, or $PORT)")
    serve.add_argument("--profile", choices=PROFILES, help="which serving options of the catalogue to use")
    serve.add_argument("--models", help="comma-separated model ids (default: all of the profile)")
    serve.set_defaults(command=_serve)

    for command in (models, run, plan, status, top, accounts, database, webhooks, usage, batch, lora):
        command.add_parser(commands)

    add_dashboard(commands)
    config = add_command(commands, "config", "print a profile's Serve config, for `serve deploy` on a cluster")
    config.add_argument("profile", choices=PROFILES, help="which serving options of the catalogue to use")
    config.add_argument("--models", help="comma-separated model ids (default: all of the profile)")
    config.add_argument(
        "--kubernetes", metavar="IMAGE", help="print a manifest for KubeRay instead, whose pods run IMAGE"
    )
    config.add_argument("--cloud", choices=clouds.CLOUDS, help="print the file for `ray up` on that cloud instead")
    config.add_argument("--redis", metavar="HOST:PORT", help="with --kubernetes: where Ray's head keeps what it knows")
    config.add_argument(
        "--code", metavar="DIR", help="run the project in DIR, the same on every node, as an upgrade or a step back"
    )
    config.set_defaults(command=_config)

    add_train_draft(commands)
    add_train_lora(commands)
    completion.add_parser(commands, parser)

    bench = commands.add_parser("bench", help="run one of the project's benchmarks", add_help=False)
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="name and options; `bench --help` lists them")
    bench.set_defaults(command=_bench)
    return found


def _serve(arguments: argparse.Namespace) -> int:
    settings = load_settings(
        host=arguments.host, port=arguments.port, profile=arguments.profile, models=arguments.models
    )
    from serve_app.serving import serve_until_interrupted

    return serve_until_interrupted(settings)


def _config(arguments: argparse.Namespace) -> int:
    if arguments.code and (arguments.cloud or arguments.kubernetes):
        raise ConfigError(
            "--code is for what `serve deploy` takes: a cloud's file names the project, and a pod's image has it"
        )
    if arguments.cloud:
        print(clouds.render(arguments.cloud), end="")
        return 0
    from serve_app import kubernetes, serve_config
    from serve_app.catalog.load import load_catalog
    from serve_app.state.check import read_operated

    settings = load_settings(profile=arguments.profile, models=arguments.models)
    catalog = load_catalog(settings.home, operated=read_operated(settings.home, settings.database))
    if arguments.kubernetes:
        print(kubernetes.render(settings, catalog, arguments.kubernetes, arguments.redis), end="")
    else:
        if arguments.code and not Path(arguments.code).is_absolute():
            raise ConfigError(f"--code is the same folder on every node: give its whole path, not {arguments.code}")
        print(serve_config.render(settings, catalog, arguments.code), end="")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import subprocess

    root = Path(__file__).resolve().parents[2]
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments.arguments], cwd=root)
