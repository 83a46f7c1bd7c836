"""Uploads a trained adapter to the server that runs on this machine, by the routes that clients use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

FILES = ("adapter_config.json", "adapter_model.safetensors")
TIMEOUT_S = 300.0


class RegisterFailed(RuntimeError):
    """The text says what the server answered."""


@dataclass(slots=True, frozen=True)
class Server:
    url: str
    account: str
    key: str

    @classmethod
    def running(cls) -> Server:
        """The one that was started with this state directory. Raises :class:`RegisterFailed`."""
        from serve_app.cluster import NotRunning, read_attachment
        from serve_app.config import api_key, load_settings

        settings = load_settings()
        try:
            return cls(read_attachment(settings.home).url, settings.account_id, api_key(settings))
        except NotRunning as error:
            raise RegisterFailed(str(error)) from None

    def register(self, name: str, model: str, folder: Path, *, public: bool = False) -> str:
        """The adapter's id. One of this name gets a new version; until both files are there the old one is served."""
        with httpx.Client(
            base_url=f"{self.url}/client/v4/accounts/{self.account}/ai/finetunes",
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=TIMEOUT_S,
        ) as client:
            there = [each for each in _result(client.get("")) if each["name"] == name]
            if there and there[0]["model"] != model:
                raise RegisterFailed(f"{name} is an adapter of {there[0]['model']} already; choose another name")
            if there:
                found = _result(client.post(f"/{there[0]['id']}/versions"))
            else:
                found = _result(client.post("", json={"model": model, "name": name, "public": public}))
            for file in FILES:
                with (folder / file).open("rb") as data:
                    answer = client.post(
                        f"/{found['id']}/finetune-assets", data={"file_name": file}, files={"file": (file, data)}
                    )
                found = _result(answer)
        return str(found["id"])


def _result(answer: httpx.Response) -> Any:
    try:
        told = answer.json()
    except ValueError:
        told = {}
    if not told.get("success"):
        errors = "; ".join(f"{each.get('message')} ({each.get('code')})" for each in told.get("errors") or ())
        raise RegisterFailed(f"the server answered {answer.status_code}: {errors or answer.text[:200]}")
    return told["result"]
