"""Structured output: what an answer must look like, as a grammar.

The gateway turns schemas, regular expressions, choices and forced tool calls into one text in llguidance's Lark
(`rules`), checked within limits (`check`, `schema`); it travels as `SamplingParams.grammar`, and each worker compiles
it for its model's tokenizer (`matcher`). No torch here.
"""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar can't be used; the text says why and what to do about it."""
