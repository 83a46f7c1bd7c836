"""Grammars in a worker: compiled for its model's tokenizer, remembered by content, one matcher per request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask
from numpy.typing import NDArray

from serve_app.engine.constrain import MaskRows
from serve_app.grammar import GrammarError
from serve_app.grammar.check import reason
from serve_app.grammar.limits import parser_limits
from serve_app.text.tokenizer import load_backend, unspellable

# Characters of grammar text whose compiled forms are kept; one character is worth about a hundred bytes.
CACHED_CHARS = 1 << 20
# Compiling lets go of the interpreter, but not of the processor that the engine runs on.
COMPILERS = 2


class Matcher:
    """One request's grammar, which has read its output so far. Implements `serve_app.engine.constrain.Constraint`."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    @property
    def error(self) -> str | None:
        return (reason(self.inner.get_error()) or "it failed") if self.inner.is_error() else None

    @property
    def ended(self) -> bool:
        return self.inner.is_stopped()

    def allowed(self, draft: list[int]) -> int:
        return max(0, self.inner.validate_tokens(draft))

    def forced(self, draft: list[int]) -> list[int]:
        read = self.inner.try_consume_tokens(draft) if draft else 0
        found = self.inner.compute_ff_tokens() if read == len(draft) and not self.inner.is_stopped() else []
        if read > 0:
            self.inner.rollback(read)
        return found

    def advance(self, token_ids: list[int]) -> int:
        for count, token in enumerate(token_ids):
            if count and self.inner.is_stopped():
                return count
            if not self.inner.consume_token(token):
                return count
        return len(token_ids)


class Grammars:
    """Compiles grammars for one model. Implements `serve_app.engine.constrain.Grammars`.

    ``folder`` holds the tokenizer; ``vocab_size`` is that of the logits; ``threads`` compute masks.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int], *, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._executor = LLExecutor(threads)
        # Handing a step's masks to a single other thread takes longer than computing them.
        self._alone = threads == 1
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        # Reading a large vocabulary takes most of a second, which the first request need not wait for.
        self._tokenizer = self._pool.submit(_tokenizer, folder, vocab_size, sorted(eos_token_ids))

    def matcher(self, grammar: str, output: Sequence[int] = ()) -> Matcher:
        """A matcher that has read ``output``, the tokens generated so far. Raises :class:`GrammarError`.

        Takes as long as compiling does, so call it where waiting hurts nobody.
        """
        compiled = self._compile(grammar).result()
        if compiled.is_error():
            raise GrammarError(reason(compiled.get_error()))
        matcher = Matcher(compiled.deep_copy())
        if matcher.advance(list(output)) < len(output) or matcher.error:
            raise GrammarError("what was generated so far does not fit it")
        return matcher

    def fill(self, wanted: Sequence[MaskRows], rows: int) -> NDArray[np.int32]:
        # Rows behind the end of a grammar stay open: what is drawn there is not kept.
        bits = allocate_token_bitmask(rows, self._tokenizer.result().vocab_size)
        pointer, size = bits.ctypes.data, bits.shape[1] * bits.itemsize
        plain = [(w.constraint.inner, w.row) for w in wanted if not w.draft]  # type: ignore[attr-defined]
        drafted = [(w.constraint.inner, w.row, w.draft) for w in wanted if w.draft]  # type: ignore[attr-defined]
        if self._alone:
            for inner, row in plain:
                inner.unsafe_compute_mask_ptr(pointer + row * size, size)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, pointer, size, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, size, rows)
        return bits

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._pool.submit(self._compiled_now, grammar)
                while sum(map(len, self._compiled)) > CACHED_CHARS and len(self._compiled) > 1:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def _compiled_now(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask is the dearest, and shows whether the grammar is too much for this vocabulary.
            matcher.compute_bitmask()
        return matcher


def _tokenizer(folder: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    try:
        backend = load_backend(folder)
        known = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return LLTokenizer(unspellable(backend), n_vocab=max(vocab_size, known), eos_token=eos_token_ids or None)
    except Exception as error:
        raise GrammarError(f"this model's tokenizer can't be constrained ({error})") from None
