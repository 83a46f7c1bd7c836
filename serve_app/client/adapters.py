"""LoRA adapters of a running server: what `serve-app lora` and `train-lora --register` share."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_app.client.server import Server, ServerError

FILES = ("adapter_config.json", "adapter_model.safetensors")
# Hears of a file how many of its bytes were sent.
Told = Callable[[str, int, int], None]


class Adapters:
    """The adapters of one key's account."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._top = f"{server.ai}/finetunes"

    def list(self, *, public: bool = False) -> list[dict[str, Any]]:
        """The account's, the oldest first; ``public``: those of all accounts that all may use."""
        return list(self._ask("GET", "/public" if public else ""))

    def get(self, name: str) -> dict[str, Any]:
        return dict(self._ask("GET", f"/{name}"))

    def delete(self, name: str) -> Any:
        return self._ask("DELETE", f"/{name}")

    def upload(
        self,
        folder: Path,
        name: str,
        model: str | None,
        *,
        new: bool = False,
        description: str = "",
        public: bool = False,
        told: Told = lambda file, done, size: None,
    ) -> dict[str, Any]:
        """The adapter in ``folder`` under ``name``. One of this name gets a new version, unless it has to be ``new``;
        until both files are there the old one is served. Raises :class:`ServerError`.
        """
        lacking = [file for file in FILES if not (folder / file).is_file()]
        if lacking:
            raise ServerError(f"{folder} has no {' and no '.join(lacking)}: save the adapter with save_pretrained", 400)
        known = None if new else self._find(name)
        if known is not None and model and known["model"] != model:
            raise ServerError(f"{name} is an adapter of {known['model']} already; choose another name", 400)
        if known is None:
            if not model:
                raise ServerError("name the model that the adapter was trained on with --model", 400)
            asked = {"model": model, "name": name, "description": description, "public": public}
            known = self._ask("POST", json=asked)
        elif known["upload"] is None:
            self._ask("POST", f"/{name}/versions")
        done = dict(known)
        for file in FILES:
            with _Counted(folder / file, told) as data:
                form = {"files": {"file": (file, data)}, "data": {"file_name": file}}
                done = dict(self._ask("POST", f"/{name}/finetune-assets", **form))
        return done

    def download(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            # Whole or not at all.
            partial = folder / f"{file}.part"
            path = f"{self._top}/{name}/finetune-assets/{file}"
            with self._server.stream("GET", path) as answer, partial.open("wb") as written:
                for piece in answer.iter_bytes():
                    written.write(piece)
            partial.replace(folder / file)

    def _find(self, name: str) -> dict[str, Any] | None:
        try:
            return self.get(name)
        except ServerError as error:
            if error.status == 404:
                return None
            raise

    def _ask(self, method: str, path: str = "", **more: Any) -> Any:
        return self._server.result(method, self._top + path, **more)


class _Counted(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, told: Told) -> None:
        super().__init__(path)
        self._name = path.name
        self._size = path.stat().st_size
        self._told = told

    def read(self, size: int | None = -1, /) -> Any:
        found = super().read(-1 if size is None else size)
        self._told(self._name, self.tell(), self._size)
        return found
