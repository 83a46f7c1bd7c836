"""Token ids to text, one at a time, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers.decoders import DecodeStream

from serve_app.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream of tokens: the deltas of `feed` and `finish` join to the decoding of all ids at once.

    The library's own incremental decoder does the work; it holds back what may be half a character. ``keep``: control
    tokens whose text is wanted (the marker of a tool call).
    """

    __slots__ = ("_hidden", "_holding", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, keep: Collection[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.difference(keep) if skip_special_tokens else frozenset()
        self._stream = DecodeStream()
        # Tokens behind the last delta, and those that the last delta came from: how a token reads depends on the one
        # before it (SentencePiece drops the space of a first word).
        self._holding: list[int] = []
        self._shown: list[int] = []

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often a word, sometimes nothing."""
        if token_id in self._hidden or not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._holding.append(token_id)
        try:
            delta = self._tokenizer.decode_next(self._stream, token_id)
        except Exception:
            # The library gives up where byte tokens are no UTF-8. What it held is shown as it reads; it starts anew.
            delta = self.finish()
            self._stream = DecodeStream(ids=[token_id])
        if delta:
            self._shown, self._holding = self._holding, []
        return delta

    def finish(self) -> str:
        """What was held back; broken characters come out as U+FFFD."""
        if not self._holding:
            return ""
        known = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        return self._tokenizer.decode(self._shown + self._holding, skip_special_tokens=False)[len(known) :]
