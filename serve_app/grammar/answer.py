"""The grammar of one request's answer: its format, the calls it must or may make, and the reasoning before both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.types import AnswerFormat, GenerateRequest
from serve_app.grammar import GrammarError
from serve_app.grammar.check import check_grammar
from serve_app.grammar.limits import MAX_PARALLEL_CALLS
from serve_app.grammar.parameters import parameter_rules
from serve_app.grammar.rules import ANY_OBJECT, choice_rule, grammar, json_rule, lark_grammar, literal, regex_rule
from serve_app.grammar.schema import check_schema
from serve_app.text.reasoning import Marks, pieces
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls.grammars import FAMILIES, CallRules, TokenRule

# A schema with one of these may describe properties elsewhere; adding to it could make it impossible.
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties")


def token_rule(tokenizer: Tokenizer) -> TokenRule:
    """Control tokens of a model by their ids. Like control tokens llguidance treats added ones in angle brackets: they
    are no text, and only a rule that names them allows them."""

    def rule(name: str) -> str | None:
        index = tokenizer.token_id(name)
        if index is None:
            return None
        bracketed = name.startswith("<") and name.endswith(">") and index in tokenizer.added_ids
        return f"<[{index}]>" if bracketed or index in tokenizer.special_ids else None

    return rule


def needs_grammar(request: GenerateRequest) -> bool:
    """Whether anything about the answer has to be enforced."""
    return request.answer_format is not None or bool(_callable(request)[0])


def answer_grammar(
    request: GenerateRequest,
    *,
    token: TokenRule,
    family: str = "none",
    marks: Marks | None = None,
    inside: bool = False,
) -> str | None:
    """The grammar's text, or None where the answer is free. Raises `InvalidInput` with the field at fault.

    ``token`` names control tokens (`text.tools.grammars.TokenRule`); ``family`` is the record's tool parser; ``marks``
    are those of the model's reasoning, which begins ``inside`` it where the prompt has opened it. Takes up to some tens
    of milliseconds: not for an event loop.
    """
    if request.sampling.min_tokens and needs_grammar(request):
        message = "min_tokens can't be combined with a format or forced tool calls, which say themselves when they end."
        raise InvalidInput(message, param="min_tokens")
    rules: dict[str, str] = {}
    answer = request.answer_format
    names, forced = _callable(request)
    calls = _calls(request, names, family, token, forced, rules) if names else None
    if answer is not None:
        body = _within(answer.field, lambda: _answer_rule(answer))
        if answer.kind == "grammar":
            if calls is not None or marks is not None:
                raise InvalidInput(f"{answer.field} can't be combined with tools or reasoning.", param=answer.field)
            return body
        rules["answer"] = body
    if calls is None:
        if answer is None:
            return None
        start = "answer"
    elif forced:
        start = calls.calls
    else:
        start = calls.mixed if answer is None else f"{calls.calls} | answer"
    if marks is not None and calls is not None and calls.headed:
        said = "" if forced else "text" if answer is None else "answer"
        start = _messages(said, calls.calls, marks, token, rules)
    elif marks is not None:
        start = _after_reasoning(start, marks, inside, token, rules)
    text = grammar(start, rules)
    if calls is not None or marks is not None:
        _within("tools", lambda: check_grammar(text, special_tokens=True))
    return text


def _callable(request: GenerateRequest) -> tuple[list[str], bool]:
    """The tools whose calls need a grammar, and whether one must be called."""
    offered = [tool["function"]["name"] for tool in request.tools or ()]
    choice = request.tool_choice
    if not offered or choice == "none":
        return [], False
    if choice == "required":
        return offered, True
    if isinstance(choice, dict) and choice["type"] == "function":
        return [choice["function"]["name"]], True
    if isinstance(choice, dict):
        allowed = choice["allowed_tools"]
        return [tool["function"]["name"] for tool in allowed["tools"]], allowed["mode"] == "required"
    return (offered, False) if request.strict_tools or request.answer_format is not None else ([], False)


def _calls(
    request: GenerateRequest, names: list[str], family: str, token: TokenRule, forced: bool, rules: dict[str, str]
) -> CallRules:
    if family not in FAMILIES:
        raise InvalidInput(
            'This model has no format for tool calls, so none can be enforced; use tool_choice "auto" or "none".',
            param="tool_choice",
        )
    by_name = {tool["function"]["name"]: (i, tool["function"]) for i, tool in enumerate(request.tools or ())}
    one = isinstance(request.tool_choice, dict) and request.tool_choice["type"] == "function"
    most = 1 if one or not request.parallel_tool_calls else MAX_PARALLEL_CALLS
    calls = FAMILIES[family](names, most, token)
    # Without control tokens, which are a model's, a grammar can be tried out.
    plain = FAMILIES[family](names, most, lambda _: None)
    rules.update(calls.rules)
    for number, name in enumerate(names):
        index, function = by_name[name]
        field = f"tools[{index}].function.parameters"
        schema = _arguments(function["parameters"])
        try:
            check_schema(schema)
            check_grammar(grammar(f"args_{number}", _argument_rules(number, schema, plain)))
        except GrammarError as error:
            # Where nothing was promised about the arguments, any object will do.
            if forced or name in request.strict_tools:
                raise InvalidInput(f"{field}: {error}.", param=field) from None
            schema = ANY_OBJECT
        rules.update(_argument_rules(number, schema, calls))
    return calls


def _argument_rules(number: int, schema: dict[str, Any], calls: CallRules) -> dict[str, str]:
    if calls.parameters is None:
        return {f"args_{number}": json_rule(schema)}
    return parameter_rules(number, schema, calls.parameters)


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments: an object, without properties that the tool does not name."""
    schema = parameters if "type" in parameters else {"type": "object", **parameters}
    if "properties" in schema and not any(key in schema for key in _COMPOSED):
        return {**schema, "additionalProperties": False}
    return schema


def _answer_rule(answer: AnswerFormat) -> str:
    if answer.kind == "grammar":
        text = lark_grammar(answer.value)
        check_grammar(text)
        return text
    if answer.kind in ("json_schema", "json_object"):
        schema = answer.value if answer.kind == "json_schema" else ANY_OBJECT
        check_schema(schema)
        body = json_rule(schema)
    else:
        body = regex_rule(answer.value) if answer.kind == "regex" else choice_rule(answer.value)
    check_grammar(grammar("answer", {"answer": body}))
    return body


def _after_reasoning(start: str, marks: Marks, inside: bool, token: TokenRule, rules: dict[str, str]) -> str:
    """The answer may only begin once reasoning has ended."""
    rules["final"] = f"SPACE? ({start})"
    rules["SPACE"] = r"/[ \n]{1,4}/"
    _thought(marks.end, token, rules)
    if inside:
        return "thought final"
    return f"{_named(marks.start, token)} thought final | {_named(marks.direct, token)} final"


def _messages(said: str, calls: str, marks: Marks, token: TokenRule, rules: dict[str, str]) -> str:
    """The same where a call is a message in the place of the last one, which has a header: ``said``, unless there must
    be a call.
    """
    rules["last"] = f"{calls} | {_named(marks.direct, token)} {said}" if said else calls
    _thought(marks.end.removesuffix(marks.direct), token, rules)
    return f"{_named(marks.start, token)} thought last | last"


def _thought(end: str, token: TokenRule, rules: dict[str, str]) -> None:
    """The rule ``thought``: reasoning up to and with ``end``."""
    if token(pieces(end)[0]):
        rules["thought"] = f"/(?s:.*)/ {_named(end, token)}"
    else:
        rules["thought[lazy]"] = f"/(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/"


def _named(mark: str, token: TokenRule) -> str:
    return " ".join(token(each) or literal(each) for each in pieces(mark))


def _within(field: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except GrammarError as error:
        raise InvalidInput(f"{field}: {error}.", param=field) from None
