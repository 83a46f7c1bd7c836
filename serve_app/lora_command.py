"""``serve-app lora``: an account's adapters on the running server."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_app.batch_client import BatchError, connect, refusal
from serve_app.usage_command import bar, can_show

FILES = ("adapter_config.json", "adapter_model.safetensors")
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
    lora = commands.add_parser(
        "lora",
        help="upload LoRA adapters to the running server, and see those there are",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = lora.add_subparsers(required=True, metavar="ACTION")
    listed = _action(actions, "list", "adapters of the account, the oldest first", _list)
    listed.add_argument("--public", action="store_true", help="those of all accounts that all may use")
    for name, said, command in (
        ("create", "upload an adapter whose name is new", _create),
        ("upload", "upload an adapter, or a new version of one", _upload),
    ):
        action = _action(actions, name, said, command)
        action.add_argument("folder", type=Path, help=f"a folder with {' and '.join(FILES)}")
        action.add_argument("--model", help="the model that it was trained on (of a new one)")
        action.add_argument("--name", default="", help="what requests call it (default: the folder's name)")
        action.add_argument("--description", default="", help="what it is good for (of a new one)")
        action.add_argument("--public", action="store_true", help="whether all accounts may use it (of a new one)")
    _action(actions, "show", "one adapter", _show).add_argument("name", help="its name or id")
    _action(actions, "delete", "delete an adapter", _delete).add_argument("name", help="its name or id")
    download = _action(actions, "download", "fetch an adapter's files", _download)
    download.add_argument("name", help="its name or id")
    download.add_argument("-o", "--output", type=Path, help="the folder to write (default: its name)")


def _action(actions: Any, name: str, help: str, command: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.add_argument("--json", action="store_true", help="as JSON")

    def run(arguments: argparse.Namespace) -> int:
        try:
            with _Server() as server:
                return int(command(arguments, server))
        except (BatchError, OSError) as error:
            print(f"serve-app: {error}", file=sys.stderr)
            return 1

    parser.set_defaults(command=run)
    return parser


class _Server:
    """The fine-tunes of one key's account."""

    def __init__(self) -> None:
        self.http, account = connect()
        self.top = f"/client/v4/accounts/{account}/ai/finetunes"

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, method: str, path: str = "", **more: Any) -> Any:
        import httpx

        try:
            answer = self.http.request(method, self.top + path, **more)
        except httpx.TransportError as error:
            raise BatchError(f"the server cannot be reached: {error}", 503) from None
        if answer.is_error:
            raise refusal(answer)
        return answer.json()["result"]

    def find(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(self.ask("GET", f"/{name}"))
        except BatchError as error:
            if error.status == 404:
                return None
            raise

    def send(self, name: str, path: Path, told: Callable[[int, int], None]) -> dict[str, Any]:
        with _Counted(path, told) as file:
            form = {"files": {"file": (path.name, file)}, "data": {"file_name": path.name}}
            return dict(self.ask("POST", f"/{name}/finetune-assets", **form))

    def fetch(self, name: str, path: Path) -> None:
        # Whole or not at all.
        partial = path.with_name(path.name + ".part")
        with self.http.stream("GET", f"{self.top}/{name}/finetune-assets/{path.name}") as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer)
            with partial.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)
        partial.replace(path)


class _Counted(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, told: Callable[[int, int], None]) -> None:
        super().__init__(path)
        self._size = path.stat().st_size
        self._told = told

    def read(self, size: int | None = -1, /) -> Any:
        found = super().read(-1 if size is None else size)
        self._told(self.tell(), self._size)
        return found


def _create(arguments: argparse.Namespace, server: _Server) -> int:
    return _send(arguments, server, new=True)


def _upload(arguments: argparse.Namespace, server: _Server) -> int:
    return _send(arguments, server, new=False)


def _send(arguments: argparse.Namespace, server: _Server, *, new: bool) -> int:
    folder = arguments.folder
    lacking = [name for name in FILES if not (folder / name).is_file()]
    if lacking:
        raise BatchError(f"{folder} has no {' and no '.join(lacking)}: save the adapter with save_pretrained", 400)
    name = arguments.name or folder.resolve().name
    known = None if new else server.find(name)
    if known is None:
        if not arguments.model:
            raise BatchError("name the model that the adapter was trained on with --model", 400)
        asked = {"model": arguments.model, "name": name, "description": arguments.description}
        known = server.ask("POST", json={**asked, "public": arguments.public})
    elif known["upload"] is None:
        server.ask("POST", f"/{name}/versions")
    done = known
    for file in FILES:
        done = server.send(name, folder / file, _progress(file, arguments.json))
    told = f"{done['name']}  version {done['version']} of rank {done['rank']} for {done['model']} is ready"
    return _print(done, arguments.json, told)


def _progress(name: str, as_json: bool) -> Callable[[int, int], None]:
    live = sys.stderr.isatty() and not as_json

    def told(done: int, size: int) -> None:
        if live:
            share = done / size if size else 1.0
            shown = bar(share, BAR, blocks=can_show("█")).ljust(BAR)
            print(f"\r{name}  {shown} {share:4.0%}", end="\n" if done >= size else "", file=sys.stderr, flush=True)

    return told


def _list(arguments: argparse.Namespace, server: _Server) -> int:
    found = server.ask("GET", "/public" if arguments.public else "")
    if arguments.json:
        return _print(found, True, "")
    for each in found:
        print(described(each))
    return 0


def _show(arguments: argparse.Namespace, server: _Server) -> int:
    found = server.ask("GET", f"/{arguments.name}")
    return _print(found, arguments.json, described(found))


def _delete(arguments: argparse.Namespace, server: _Server) -> int:
    return _print(server.ask("DELETE", f"/{arguments.name}"), arguments.json, f"{arguments.name} is deleted")


def _download(arguments: argparse.Namespace, server: _Server) -> int:
    found = server.ask("GET", f"/{arguments.name}")
    folder = arguments.output or Path(found["name"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        server.fetch(arguments.name, folder / name)
    return _print(found, arguments.json, f"{folder} has version {found['version']} of {found['name']}")


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


def _print(found: Any, as_json: bool, said: str) -> int:
    print(json.dumps(found, indent=2) if as_json else said)
    return 0
