"""Token ids to text, one at a time, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Collection

from serve_app.text.tokenizer import Tokenizer

_PARTIAL = "\ufffd"


class Detokenizer:
    """The text of one stream of tokens: the deltas of `feed` and `finish` join to the decoding of all ids at
    once.

    How a token reads depends on the one before it (SentencePiece drops the space of a first word), so each
    delta is the difference of two decodings of a short window:

        ids   ... | prefix .. read | new ...
                  decode(window to read) is the known part, decode(whole window) minus that is the delta

    Text that ends in U+FFFD may be half a character and waits for more. ``keep``: control tokens whose text
    is wanted (the marker of a tool call).
    """

    __slots__ = ("_hidden", "_ids", "_prefix", "_read", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, keep: Collection[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.difference(keep) if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        # Characters of the unfinished window that were given out already.
        self._shown = 0

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often a word, sometimes nothing."""
        if token_id in self._hidden or not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back; broken characters come out as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        decode = self._tokenizer.decode
        known = decode(self._ids[self._prefix : self._read], skip_special_tokens=False)
        text = decode(self._ids[self._prefix :], skip_special_tokens=False)
        fresh = text[len(known) :]
        certain = fresh if final else fresh.rstrip(_PARTIAL)
        delta = certain[self._shown :]
        if len(certain) < len(fresh):
            self._shown = max(self._shown, len(certain))
            return delta
        if fresh:
            # Keeps one window with text as context for the next; ids before it are no longer needed.
            del self._ids[: self._read]
            self._prefix, self._read = 0, len(self._ids)
        else:
            self._read = len(self._ids)
        self._shown = 0
        return delta
