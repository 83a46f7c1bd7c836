"""Whether a grammar can be used at all, found out without a model: what the gateway refuses never reaches a worker."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from serve_app.grammar import GrammarError
from serve_app.grammar.limits import MAX_GRAMMAR_BYTES, parser_limits

# Some expressions are harmless to compile and grow as they are read.
TRIAL_BYTES = 16
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_ROW = re.compile(r"\d+ items; max is \d+")
_SOURCE = re.compile(r"^\s*\d+ \| ")


@lru_cache(maxsize=256)
def check_grammar(text: str, *, special_tokens: bool = False) -> None:
    """Raises :class:`GrammarError` for a text that is no grammar, that asks for too much work, or that no text fits.

    Compiles it for a tokenizer of single bytes and writes the first of them, except for grammars of our own that name
    ``special_tokens``, which only a model has. Lets go of the interpreter meanwhile.
    """
    if len(text.encode()) > 2 * MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it makes a grammar of more than {2 * MAX_GRAMMAR_BYTES} bytes; make it smaller")
    limits = parser_limits()
    if error := LLMatcher.validate_grammar(text, limits=limits):
        raise GrammarError(reason(error))
    if special_tokens:
        return
    matcher = LLMatcher(_bytes(), text, log_level=0, limits=limits)
    bits = allocate_token_bitmask(1, _bytes().vocab_size)
    for _ in range(TRIAL_BYTES):
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, bits)
        if matcher.is_error() or not np.any(bits):
            raise GrammarError(reason(matcher.get_error()) or "no text fits it")
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:256])
        if matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(allowed[0]))


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def reason(error: str) -> str:
    """llguidance's message without the grammar it is about, which may be long and is not the client's wording."""
    if found := _UNIMPLEMENTED.search(error):
        names = found[1].replace('"', "")
        return f"the JSON schema keywords {names} are not supported; leave them out"
    lines = [line for line in error.splitlines() if line.strip() and not _SOURCE.match(line) and set(line) - set(" ^")]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    said = re.sub(r"^at \d+\(\d+\): ", "", said).removeprefix("failed to compile JSON schema: ").removeprefix("error: ")
    if said.startswith("NoExtension"):
        return "no text fits it"
    if found := _ROW.search(said):
        return f"it allows too much at one place ({found[0]}); use fewer alternatives and optional properties"
    if "too many" in said.lower() or "too large" in said.lower() or "fuel" in said:
        return f"it asks for too much work ({said[:80]}); use smaller counts and fewer alternatives"
    return said[:200]
