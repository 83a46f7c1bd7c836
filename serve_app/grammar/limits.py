"""How much work a grammar may cause, on every machine that reads it."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_ENUM_VALUES = 4096
# Of one object. Each is an alternative at every place, and the work grows with the square of their number.
MAX_OPTIONAL_PROPERTIES = 500
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1024
MAX_PARALLEL_CALLS = 16


def parser_limits() -> LLParserLimits:
    """llguidance counts work in fuel and items; these are worth some tens of milliseconds to compile and at most about
    ten per mask, and some tens of megabytes for the lexer of one request."""
    return LLParserLimits(
        max_items_in_row=5 * MAX_OPTIONAL_PROPERTIES,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
