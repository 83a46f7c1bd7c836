"""What the worker of a translator does: M2M100 and what else of transformers is told languages by tokens."""

from __future__ import annotations

from typing import Any

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from serve_app.predict.predictor import BadInput, Item, Place
from serve_app.predict.rewriting import Rewriter


class Translator(Rewriter):
    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        source, target = (self._language(options.get(name) or "en") for name in ("source", "target"))

        def before() -> None:
            self.tokenizer.src_lang = source[0]

        ids = self.read(data.decode(), before)
        return Item(ids, len(ids), kind=(("forced_bos_token_id", target[1]),))

    def _language(self, name: str) -> tuple[str, int]:
        """A language as the tokenizer calls it, and its token. Raises :class:`BadInput`."""
        tokens: dict[str, str] = getattr(self.tokenizer, "lang_code_to_token", None) or {}
        for code in (name, name.lower(), TO_LANGUAGE_CODE.get(name.lower(), "")):
            token = tokens.get(code, code)
            number = self.tokenizer.convert_tokens_to_ids(token) if token else None
            if number is not None and number != self.tokenizer.unk_token_id and (not tokens or code in tokens):
                return code, int(number)
        known = ", ".join(sorted(tokens)) or "see its files"
        raise BadInput(f"This model does not know the language {name[:32]!r}; it knows: {known}.")

    def example(self) -> bytes:
        return b"a"


def load(place: Place) -> Translator:
    return Translator(place)
