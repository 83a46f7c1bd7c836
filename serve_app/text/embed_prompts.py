"""What an embedder wants written before a text, as sentence-transformers' files in its folder say."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Literal

from serve_app.api.errors import InvalidInput

Role = Literal["query", "document"]
# As `encode_query` and `encode_document` of sentence-transformers look for them.
_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
# Qwen3-Embedding's form: the instruction is the rest of the first line.
_INSTRUCT = "Instruct: "


@lru_cache(maxsize=64)
def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """The prompts by name, and the one for texts of which nothing is said."""
    file = folder / "config_sentence_transformers.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    prompts = {str(k): v for k, v in (config.get("prompts") or {}).items() if isinstance(v, str)}
    return prompts, prompts.get(str(config.get("default_prompt_name")), "")


def prompt_for(folder: Path, role: Role | None, instruction: str = "") -> str:
    """What goes before texts of ``role``; empty for most models. Raises `InvalidInput` for an ``instruction`` that the
    model has no place for."""
    prompts, usual = _prompts(folder)
    if instruction and role != "document":
        first, _, rest = prompts.get("query", "").partition("\n")
        if not first.startswith(_INSTRUCT):
            raise InvalidInput("This model takes no instruction; leave it out.", param="instruction")
        return f"{_INSTRUCT}{instruction}\n{rest}"
    if role is None:
        return usual
    return next((prompts[name] for name in _NAMES[role] if name in prompts), "")
