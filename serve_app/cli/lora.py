"""``serve-app lora``: an account's adapters on the running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_app.cli.groups import Group, can_show, served, show
from serve_app.cli.usage import bar
from serve_app.client.adapters import FILES, Adapters, Told
from serve_app.client.server import Server

BAR = 24
_ABOUT = """\
A LoRA adapter is a small addition to a model, in the two files that PEFT's save_pretrained writes: adapter_config.json
and adapter_model.safetensors. Requests name it by `lora`, or as a model: @cf/author/base@name.

examples:
  serve-app lora upload FOLDER --model @cf/pico/pico-instruct --name mine   a new one, or a new version of it
  serve-app lora list                                                      those of the account
  serve-app lora show mine                                                 its version, rank, and what it lacks
  serve-app lora download mine -o FOLDER                                   its files again
  serve-app lora delete mine                                               requests under way go on
"""


def add_parser(commands: Any) -> None:
    lora = Group(commands, "lora", "upload LoRA adapters to the running server, and see those there are", _ABOUT)
    listed = lora.action("list", "adapters of the account, the oldest first", _with(_list), json=True)
    listed.add_argument("--public", action="store_true", help="those of all accounts that all may use")
    for name, said, command in (
        ("create", "upload an adapter whose name is new", _create),
        ("upload", "upload an adapter, or a new version of one", _upload),
    ):
        action = lora.action(name, said, _with(command), json=True)
        action.add_argument("folder", type=Path, help=f"a folder with {' and '.join(FILES)}")
        action.add_argument("--model", help="the model that it was trained on (of a new one)")
        action.add_argument("--name", default="", help="what requests call it (default: the folder's name)")
        action.add_argument("--description", default="", help="what it is good for (of a new one)")
        action.add_argument("--public", action="store_true", help="whether all accounts may use it (of a new one)")
    lora.action("show", "one adapter", _with(_show), json=True).add_argument("name", help="its name or id")
    lora.action("delete", "delete an adapter", _with(_delete), json=True).add_argument("name", help="its name or id")
    download = lora.action("download", "fetch an adapter's files", _with(_download), json=True)
    download.add_argument("name", help="its name or id")
    download.add_argument("-o", "--output", type=Path, help="the folder to write (default: its name)")


def _with(command: Callable[[argparse.Namespace, Adapters], int]) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace, server: Server) -> int:
        return command(arguments, Adapters(server))

    return served(run)


def _create(arguments: argparse.Namespace, adapters: Adapters) -> int:
    return _send(arguments, adapters, new=True)


def _upload(arguments: argparse.Namespace, adapters: Adapters) -> int:
    return _send(arguments, adapters, new=False)


def _send(arguments: argparse.Namespace, adapters: Adapters, *, new: bool) -> int:
    done = adapters.upload(
        arguments.folder,
        arguments.name or arguments.folder.resolve().name,
        arguments.model,
        new=new,
        description=arguments.description,
        public=arguments.public,
        told=_progress(arguments.json),
    )
    told = f"{done['name']}  version {done['version']} of rank {done['rank']} for {done['model']} is ready"
    return show(done, arguments.json, told)


def _progress(as_json: bool) -> Told:
    live = sys.stderr.isatty() and not as_json

    def told(name: str, done: int, size: int) -> None:
        if live:
            share = done / size if size else 1.0
            shown = bar(share, BAR, blocks=can_show("█")).ljust(BAR)
            print(f"\r{name}  {shown} {share:4.0%}", end="\n" if done >= size else "", file=sys.stderr, flush=True)

    return told


def _list(arguments: argparse.Namespace, adapters: Adapters) -> int:
    found = adapters.list(public=arguments.public)
    if arguments.json:
        return show(found, True, "")
    for each in found:
        print(described(each))
    return 0


def _show(arguments: argparse.Namespace, adapters: Adapters) -> int:
    found = adapters.get(arguments.name)
    return show(found, arguments.json, described(found))


def _delete(arguments: argparse.Namespace, adapters: Adapters) -> int:
    return show(adapters.delete(arguments.name), arguments.json, f"{arguments.name} is deleted")


def _download(arguments: argparse.Namespace, adapters: Adapters) -> int:
    found = adapters.get(arguments.name)
    folder = arguments.output or Path(found["name"])
    adapters.download(arguments.name, folder)
    return show(found, arguments.json, f"{folder} has version {found['version']} of {found['name']}")


def described(finetune: dict[str, Any]) -> str:
    """A line for people, and one for what is the matter."""
    size = f"{finetune['size'] / 1e6:,.1f} MB" if finetune["size"] else ""
    version = f"v{finetune['version']}, rank {finetune['rank']}" if finetune["version"] else ""
    public = "public" if finetune["public"] else ""
    cells = (f"{finetune['name']:24}", f"{finetune['status']:8}", finetune["model"], version, size, public)
    line = "  ".join(cell for cell in cells if cell)
    if upload := finetune.get("upload"):
        why = upload["problem"] or f"lacks {' and '.join(upload['missing'])}"
        line += f"\n  version {upload['version']}: {why}"
    return line.rstrip()
