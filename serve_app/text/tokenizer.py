"""A model's tokenizer, read from its folder with the `tokenizers` library alone.

Text that people wrote never becomes a control token (`control`).
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from serve_app.api.fields.content import Medium
from serve_app.api.types import Shorten
from serve_app.text.chat_template import ChatTemplate, TemplateFailed
from serve_app.text.control import ControlTokens, control_names
from serve_app.text.media import MediaRule
from serve_app.text.pictures import PictureRule, read_rule
from serve_app.text.shorten import kept_tokens
from serve_app.text.sounds import SoundRule, read_sound_rule

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_backend(folder: Path) -> Backend:
    """The library's tokenizer of a model's folder, with the tokens that only ``tokenizer_config.json`` lists.

    Raises `FileNotFoundError` where the folder has no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; only fast tokenizers can be served. Write one with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...), and compare the numbers of its "
            "control tokens with those of the original"
        )
    backend = Backend.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    known = backend.get_added_tokens_decoder()
    listed = _json(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    for index in sorted(listed, key=int):
        if int(index) not in known:
            fields = {k: v for k, v in listed[index].items() if k != "content" and not k.startswith("__")}
            backend.add_tokens([AddedToken(listed[index]["content"], **fields)])
    return backend


def unspellable(backend: Backend) -> str:
    """``backend`` as JSON, with names for its control tokens that no text has; ids stay.

    For llguidance, which tokenises text that a grammar forces. Where that spells a control token (a choice ``<|end|>``,
    say), it must become ordinary tokens: the control token is no text, and the grammar refuses it.
    """
    spec, secret = json.loads(backend.to_str()), secrets.token_hex(8)
    added = {token["content"]: token for token in spec["added_tokens"]}
    names = {
        name: f"<{secret}:{i}>"
        for i, (name, token) in enumerate(added.items())
        if token["special"] or (name.startswith("<") and name.endswith(">"))
    }
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): index for name, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(spec)


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


class Tokenizer:
    """``Tokenizer(folder)``; raises `FileNotFoundError` where the folder has no tokenizer.json.

    ``special_ids``: ids of control tokens; ``added_ids`` also of others that stand outside the learned vocabulary.
    ``vocab_size``: ids the tokenizer knows, without stand-ins.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._backend = load_backend(self.folder)
        self.config = _json(self.folder, "tokenizer_config.json")
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # Characters of the longest token, which also bounds the bytes of text that one token can stand for.
        self.longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self.special_tokens = self._special_tokens()
        self.bos_id = self._id_of("bos_token")
        self.control = ControlTokens(self._backend, control_names(added, self.chat_templates.values()))

    def _json(self, name: str) -> dict[str, Any]:
        return _json(self.folder, name)

    def _special_tokens(self) -> dict[str, str]:
        merged = {**self._json("special_tokens_map.json"), **self.config}
        found = {}
        for name in (*_NAMED, *(key for key in merged if key.endswith("_token"))):
            value = merged.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    # -- to ids and back --------------------------------------------------------------------------------

    def encode_prompt(self, text: str, *, add_special_tokens: bool = False, at_once: bool = False) -> np.ndarray:
        """Token ids (int32, [tokens]) of a rendered prompt: control tokens count as such, stand-ins as
        ordinary text. ``at_once``: see :meth:`ControlTokens.reader`."""
        backend, [text] = self.control.reader([text], at_once=at_once)
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        # A raw prompt may already start with the token that the tokenizer puts in front.
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            ids = ids[1:]
        return np.asarray(ids, dtype=np.int32)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids (int32, [tokens]) of text that people wrote; control tokens it spells stay ordinary
        text."""
        return self.encode_prompt(self.control.neutralise(text), add_special_tokens=add_special_tokens)

    def encode_batch(
        self, texts: list[str], *, add_special_tokens: bool = True, shorten: Shorten | None = None
    ) -> list[np.ndarray]:
        """`encode` for many texts at once, each cut as ``shorten`` says."""
        backend, safe = self.control.reader([self.control.neutralise(text) for text in texts])
        encodings = backend.encode_batch(safe, add_special_tokens=add_special_tokens)
        if shorten is None:
            return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        return [_shortened(encoding, shorten)[0] for encoding in encodings]

    def encode_pairs(
        self, pairs: list[tuple[str, str]], *, shorten: Shorten | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids, token type ids), both int32 [tokens], of text pairs as a cross-encoder reads them."""
        backend, safe = self.control.reader([self.control.neutralise(text) for pair in pairs for text in pair])
        encodings = backend.encode_batch(list(zip(safe[::2], safe[1::2], strict=True)), add_special_tokens=True)
        return [_shortened(encoding, shorten) for encoding in encodings]

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids outside the vocabulary have none."""
        return self._backend.decode(
            [int(i) for i in ids if 0 <= i < self.vocab_size],
            skip_special_tokens=skip_special_tokens,
        )

    def decode_next(self, stream: DecodeStream, token_id: int) -> str:
        """The text that becomes certain with the next token of ``stream``, control tokens by name."""
        return stream.step(self._backend, token_id) or ""

    @lru_cache(maxsize=65536)  # noqa: B019 - a tokenizer lives as long as its model
    def token_text(self, token_id: int) -> str:
        """One token on its own, control tokens by name; U+FFFD where it is only part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        index = self._backend.token_to_id(token)
        return index if index is not None and index < self.vocab_size else None

    def min_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at the very least, known without tokenising: to refuse a huge
        prompt early.

        0 where the tokenizer may drop text (white space between BERT's words, runs of unknown characters).
        """
        return len(text) // (self.longest_token * self._shrinking) if self._shrinking else 0

    @cached_property
    def _shrinking(self) -> int:
        """By how much normalisation can shorten text: 1 not at all, 4 where characters are composed, 0
        without a bound."""
        spec = json.loads(self._backend.to_str())
        model = spec.get("model") or {}
        stripping = any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or [])
        normalizer = json.dumps(spec.get("normalizer"))
        if model.get("type") != "BPE" or model.get("fuse_unk") or stripping or "Strip" in normalizer:
            return 0
        kinds = set(re.findall(r'"type": "(\w+)"', normalizer))
        if kinds <= {"Replace", "Prepend", "Sequence"}:
            return 1 if '"content": ""' not in normalizer else 0
        return 4 if kinds <= {"Replace", "Prepend", "Sequence", "NFC"} else 0

    # -- chat template ----------------------------------------------------------------------------------

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Template sources by name; the nameless one is ``default``. Empty where the model has none."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return {"default": path.read_text("utf-8")}
        source = self._json("chat_template.json").get("chat_template") or self.config.get("chat_template")
        if isinstance(source, list):
            return {item["name"]: item["template"] for item in source}
        return {"default": source} if isinstance(source, str) else {}

    @lru_cache(maxsize=4)  # noqa: B019
    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate | None:
        """The compiled template; one named ``tool_use`` takes conversations with tools. None where there is
        none."""
        sources = self.chat_templates
        source = (sources.get("tool_use") if with_tools else None) or sources.get("default")
        return None if source is None else ChatTemplate(source, self.special_tokens)

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template shows text only where it comes as a list of parts, as those of models that see do."""
        template, said = self.chat_template(), "as one string"
        if template is None:
            return False
        try:
            return said not in template.render([{"role": "user", "content": said}])
        except TemplateFailed:
            return True

    @cached_property
    def pictures(self) -> PictureRule:
        """What stands in prompts for pictures. Raises :class:`~serve_app.text.media.NoMedia`."""
        return read_rule(self.folder, self.control.names)

    @cached_property
    def sounds(self) -> SoundRule:
        """What stands in prompts for sounds. Raises :class:`~serve_app.text.media.NoMedia`."""
        return read_sound_rule(self.folder, self.control.names)

    def rule_of(self, medium: Medium) -> MediaRule:
        """What stands in prompts for files of a medium. Raises :class:`~serve_app.text.media.NoMedia`."""
        return self.pictures if medium == "image" else self.sounds


def _shortened(encoding: Any, shorten: Shorten | None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and types, both int32, of one text or pair, cut as ``shorten`` says."""
    ids, types = np.asarray(encoding.ids, np.int32), np.asarray(encoding.type_ids, np.int32)
    if shorten is None:
        return ids, types
    texts = np.array([-1 if text is None else text for text in encoding.sequence_ids], np.int32)
    kept = kept_tokens(texts, shorten)
    return ids[kept], types[kept]
