"""What a folder's ``generation_config.json`` says of answers: where they end, and which tokens are not taken.

transformers reads the file, or ``config.json`` where there is none. What decides about greedy answers is followed as
``generate`` follows it; what is not followed is named in the log and in the model's report.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from serve_app.engine.rules import Rules
from serve_app.models.loading.folder import UnsupportedModel

log = logging.getLogger(__name__)

# Other ways to search, and logits that are changed otherwise: each with the values that change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "force_words_ids": (), "constraints": (),
    "penalty_alpha": (0,), "dola_layers": (), "guidance_scale": (1,), "sequence_bias": (),
    "exponential_decay_length_penalty": (), "encoder_repetition_penalty": (1,), "watermarking_config": (),
    "token_healing": (False,), "stop_strings": (), "use_mtp": (),
}  # fmt: skip


def take_generation_config(module: Any, path: Path) -> None:
    """Gives ``module`` its generation config as ``from_pretrained`` does."""
    from transformers import GenerationConfig

    own = (path / "generation_config.json").is_file()
    more = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    module.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True, **more)


def end_tokens(module: Any, path: Path) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config, as in ``generate``; where it has none, and
    ``generate`` would not end, those of ``config.json``."""
    for source in (getattr(module, "generation_config", None), module.config):
        if (found := getattr(source, "eos_token_id", None)) is not None:
            return _Reader(path, {"eos_token_id": found}).tokens("eos_token_id")
    return frozenset()


def read_rules(module: Any, path: Path) -> tuple[Rules | None, str]:
    """The rules of the folder's answers, None where they change nothing, and the names of what is not followed.

    Raises :class:`UnsupportedModel` for values of a wrong kind."""
    config = getattr(module, "generation_config", None)
    values = {name: value for name, value in vars(config).items() if value is not None} if config is not None else {}
    read, ends = _Reader(path, values), end_tokens(module, path)
    rules = Rules(
        repetition_penalty=read.penalty("repetition_penalty"),
        min_new_tokens=read.count("min_new_tokens"),
        min_length=read.count("min_length"),
        suppress=read.tokens("suppress_tokens"),
        begin_suppress=read.tokens("begin_suppress_tokens"),
        # What is bad as a word may still end the answer.
        bad_words=tuple(word for word in read.words("bad_words_ids") if len(word) > 1 or word[0] not in ends),
        no_repeat_ngram_size=read.count("no_repeat_ngram_size"),
        encoder_no_repeat_ngram_size=read.count("encoder_no_repeat_ngram_size"),
        forced_bos=min(read.tokens("forced_bos_token_id"), default=None),
        forced_eos=read.tokens("forced_eos_token_id"),
    )
    ignored = [name for name, same in _NOT_FOLLOWED.items() if name in values and values[name] not in same]
    if ignored:
        log.warning("%s: answers do not follow %s of its generation_config.json", path, ", ".join(ignored))
    return None if rules == Rules() else rules, ", ".join(ignored)


class _Reader:
    """Values of a generation config, each of the kind that it must be."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values

    def count(self, name: str) -> int:
        value = self._values.get(name, 0)
        return value if _whole(value) and value >= 0 else self._refuse(name, "a number of tokens")

    def penalty(self, name: str) -> float:
        value = self._values.get(name, 1.0)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and 0 < value < math.inf else self._refuse(name, "a number above 0")

    def tokens(self, name: str) -> frozenset[int]:
        value = self._values.get(name, ())
        found = list(value) if isinstance(value, (list, tuple)) else [value]
        return frozenset(found) if all(map(_whole, found)) else self._refuse(name, "the number of a token, or several")

    def words(self, name: str) -> list[tuple[int, ...]]:
        value = self._values.get(name, ())
        right = isinstance(value, (list, tuple)) and all(
            isinstance(w, list) and w and all(map(_whole, w)) for w in value
        )
        return [tuple(word) for word in value] if right else self._refuse(name, "lists of tokens' numbers")

    def _refuse(self, name: str, wanted: str) -> Any:
        said = repr(self._values[name])[:60]
        raise UnsupportedModel(f"{self._path}/generation_config.json: {name} is {said}; it must be {wanted}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
