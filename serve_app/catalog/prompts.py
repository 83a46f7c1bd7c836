"""Prompt templates: files that the operator keeps in ``prompts/`` of the state directory, named after their templates.

    # prompts/support.yaml
    default: "2"                    # the version for requests that name none; the last one unless given
    accounts: [team-a]              # who may use it; everybody unless given
    versions:
      "1": {instructions: "You answer for {{company}}."}
      "2":
        instructions: You answer for {{company}}, in {{language}}.
        messages: [{role: user, content: "I am {{name}}."}]
        defaults: {model: "@cf/pico/pico-instruct", temperature: 0}

A file is read when a request names it and has changed since, so that no gateway has to be started again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_BYTES = 1 << 20


class BrokenPrompt(Exception):
    """A file that is no template; the message says why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class PromptVersion(_Strict):
    """``defaults``: fields of requests that do not have them."""

    instructions: str | None = None
    messages: list[PromptMessage] = Field(default=[], max_length=1024)
    defaults: dict[str, Any] = {}

    @model_validator(mode="after")
    def _says_something(self) -> PromptVersion:
        if self.instructions is None and not self.messages:
            raise ValueError("it has neither instructions nor messages")
        if wrong := self.defaults.keys() & {"input", "instructions", "prompt", "conversation", "previous_response_id"}:
            raise ValueError(f"defaults must not hold {sorted(wrong)[0]}")
        return self


class PromptFile(_Strict):
    versions: dict[str, PromptVersion] = Field(min_length=1)
    default: str | None = None
    accounts: list[str] | None = None

    @field_validator("versions", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        # YAML reads 1 as a number.
        return {str(name): version for name, version in value.items()} if isinstance(value, dict) else value

    @field_validator("default", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _has_default(self) -> PromptFile:
        if self.default is not None and self.default not in self.versions:
            raise ValueError(f"default names version {self.default}, which is not there")
        return self


class Prompts:
    """The templates of the state directory ``home``."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "prompts"
        self._read: dict[str, tuple[tuple[int, int], PromptFile]] = {}

    def find(self, prompt_id: str, version: str | None, account: str) -> tuple[str, PromptVersion] | None:
        """The template's version and its name; None where there is none for this account. ``prompt_id`` has letters,
        digits, ``_`` and ``-``. Reads the file if it has changed. Raises :class:`BrokenPrompt`.
        """
        found = self._file(prompt_id)
        if found is None or (found.accounts is not None and account not in found.accounts):
            return None
        name = version or found.default or list(found.versions)[-1]
        asked = found.versions.get(name)
        return None if asked is None else (name, asked)

    def _file(self, prompt_id: str) -> PromptFile | None:
        path = self._folder / f"{prompt_id}.yaml"
        try:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            known = self._read.get(prompt_id)
            if known is not None and known[0] == state:
                return known[1]
            if status.st_size > MAX_BYTES:
                raise BrokenPrompt(f"it has more than {MAX_BYTES} bytes")
            found = PromptFile.model_validate(yaml.safe_load(path.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            raise BrokenPrompt(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
            raise BrokenPrompt(str(error).splitlines()[0]) from None
        self._read[prompt_id] = state, found
        return found
