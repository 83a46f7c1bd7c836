"""Arguments that a family writes one after another, each as a key and a value, instead of as one JSON object: the rule
that fits a tool's schema.

Strings stand there without quotes, so that each is a terminal together with the mark behind it. Where the schema alone
tells how a value is meant, no string may read like a value of another type that the schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from serve_app.grammar import GrammarError
from serve_app.grammar.check import check_grammar
from serve_app.grammar.rules import choice_rule, grammar, json_rule, literal
from serve_app.grammar.texts import text_terms, without
from serve_app.text.tool_calls.declared import MAX_DEPTH, NUMBER, kind_of, kinds, resolve
from serve_app.text.tool_calls.grammars import Parameters

# Keywords of an object that a sequence of keys and values can't follow.
_WHOLE = ("allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties", "propertyNames",
          "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
          "unevaluatedProperties")  # fmt: skip
# Keywords of a value that only JSON's grammar follows.
_COMPOSED = ("not", "if", "allOf", "$ref", "$dynamicRef")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_BESIDE_REF = _NOTES | {"$ref", "$defs", "definitions", "$schema"}
# White space that Python strips.
_SPACE = r"\s\x1c-\x1f"
# What reads like values of a type, or for brackets, what values of the type begin with.
_LOOKS = {"null": "null", "boolean": "true|false", "number": NUMBER, "integer": NUMBER}
_BRACKETS = {"array": r"\[", "object": r"\{"}
_SCALARS = {"null": "null", "boolean": "true|false", "number": NUMBER, "integer": "-?(?:0|[1-9][0-9]*)"}
_LONGEST_KEY = 64
# That an expression and a length never fit together can take the lexer as many steps as the length.
_LONG = 1000


def parameter_rules(number: int, schema: dict[str, Any], form: Parameters) -> dict[str, str]:
    """The rule ``args_{number}`` for arguments of ``schema``, which `check_schema` has let pass, and those it refers
    to. Raises :class:`GrammarError`."""
    return _Rules(number, schema, form).rules


class _Rules:
    def __init__(self, number: int, root: dict[str, Any], form: Parameters) -> None:
        self.rules: dict[str, str] = {}
        self._number = number
        self._root = root
        self._form = form
        self._count = 0
        schema = self._object(root)
        properties = {key: value for key, value in (schema.get("properties") or {}).items() if value is not False}
        rest = schema.get("additionalProperties", "properties" not in schema)
        required = schema.get("required") or []
        for key in required:
            if key not in properties and rest is False:
                raise GrammarError(f"it requires {str(key)[:60]!r}, which it does not allow")
            properties.setdefault(key, rest)
        parts = []
        for key, value in properties.items():
            self._check_key(key)
            parts.append(self._pair(literal(key), key, value) + ("" if key in required else "?"))
        if rest is not False:
            parts.append(self._pair(self._free_key(list(properties)), None, rest) + "*")
        written = " ".join(parts)
        if form.empty and not required:
            written = f"{written} | {form.empty}" if written else form.empty
        self.rules[f"args_{number}"] = written or '""'

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_DEPTH):
            if "$ref" not in schema:
                break
            schema = self._target({key: value for key, value in schema.items() if key != "type"})
        for key in _WHOLE:
            if key in schema:
                raise GrammarError(
                    f"the keyword {key} is not supported for the arguments of a model that writes them one by one; "
                    "describe them by properties and required"
                )
        if "object" not in kinds(schema, self._root):
            raise GrammarError("arguments are an object; give it the type object")
        return schema

    def _target(self, schema: dict[str, Any]) -> dict[str, Any]:
        found = resolve(self._root, schema["$ref"])
        if not isinstance(found, dict) or schema.keys() - _BESIDE_REF:
            raise GrammarError(f"a $ref to {str(schema['$ref'])[:60]!r} is not supported here; copy what it names")
        return found

    def _check_key(self, key: str) -> None:
        if not 0 < len(key) <= 256 or key != key.strip() or any(char in self._form.banned for char in key):
            raise GrammarError(f"this model can't write the name of the property {key[:60]!r}; use letters and digits")

    def _free_key(self, named: list[str]) -> str:
        """A key that the schema does not name."""
        name = f"KEY_{self._number}"
        others = f" & ~{choice_rule(named)}" if named else ""
        banned = "".join(f"\\x{ord(char):02x}" for char in self._form.banned)
        self.rules[name] = rf"/[^\s{banned}][^\x00-\x1f{banned}]{{0,{_LONGEST_KEY}}}/ & /(?s:.*)[^\s]/{others}"
        return name

    def _pair(self, key: str, name: str | None, schema: Any) -> str:
        """The rule for one key and its value; ``name`` is the key where there is only one."""
        value: dict[str, Any] = schema if isinstance(schema, dict) else {}
        self._count += 1
        rule = f"pair_{self._number}_{self._count}"
        options = [f"{self._form.before(key, text)} {written}" for text, written in self._written(value)]
        if not options:
            raise GrammarError(f"no value fits the property {(name or '')[:60]!r}")
        self.rules[rule] = f"({' | '.join(options)}) {self._form.after}".rstrip()
        return rule

    def _written(self, schema: dict[str, Any]) -> Iterator[tuple[bool, str]]:
        """What a value and the mark behind it can be; whether it is a string or JSON."""
        form, allowed = self._form, kinds(schema, self._root)
        if "string" not in allowed:
            yield False, f"{self._json(schema)} {form.end_of_json}"
            return
        texts, others = self._split(schema, 0)
        scalars = [] if form.told else [_scalar(other) for other in others if _is_scalar(other)]
        unlike = [] if form.told else _unlike(allowed)
        if texts or scalars:
            yield True, self._text(texts, unlike, scalars)
        left = others if form.told else [other for other in others if not _is_scalar(other)]
        if left:
            yield False, f"{self._json({'anyOf': left})} {form.end_of_json}"

    def _json(self, schema: dict[str, Any]) -> str:
        rule = f"json_{self._number}_{len(self.rules)}"
        defs: dict[str, Any] = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        text = json.dumps(schema)
        if '"$ref"' in text:
            for reference in _references(schema, defs):
                if not str(reference).startswith(("#/$defs/", "#/definitions/")):
                    raise GrammarError(
                        f"the $ref {str(reference)[:60]!r} must lead into $defs; move what it names there"
                    )
            schema = {**schema, **defs}
        self.rules[rule] = json_rule(schema)
        return rule

    def _text(self, texts: list[dict[str, Any]], unlike: list[str], scalars: list[str]) -> str:
        """The terminal for one of ``texts``, ``unlike`` values of other types, or of ``scalars``, and the mark."""
        name = f"{self._number}_{len(self.rules)}"
        marked = " & ".join((f"/{without(self._form.mark)}/", *unlike))
        options = []
        for number, text in enumerate(texts):
            option = f"STRING_{name}_{number}"
            terms = text_terms(text)
            if unlike and "pattern" in text and max(text.get("maxLength", 0), text.get("minLength", 0)) > _LONG:
                raise GrammarError(
                    f"a pattern with a length above {_LONG} is not supported where a value may be a string or of "
                    "another type; leave one out"
                )
            self.rules[option] = " & ".join((*terms, marked))
            if terms:
                # Alone, since behind the beginning of a call nobody would find out that nothing fits.
                check_grammar(grammar("SOME", {"SOME": f"{option} {literal('.')}", option: self.rules[option]}))
            options.append(option)
        options += [f"/{scalar}/" for scalar in scalars]
        suffix = f" {literal(self._form.suffix)}" if self._form.suffix else ""
        self.rules[f"TEXT_{name}"] = f"({' | '.join(options)}){suffix}"
        return f"TEXT_{name} {self._form.rest}".rstrip()

    def _split(self, schema: Any, depth: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Schemas of the strings that fit ``schema``, and of the other values, which allow one type each."""
        if schema is False:
            return [], []
        schema = schema if isinstance(schema, dict) else {}
        if depth > MAX_DEPTH:
            raise GrammarError("what may be a string refers to itself; describe it without a $ref")
        if "$ref" in schema:
            return self._split(self._target(schema), depth + 1)
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and schema.keys() <= _NOTES | {"allOf"}:
            return self._split(parts[0], depth + 1)
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                return self._split_union(schema, union, depth)
        allowed = kinds(schema, self._root) - ({"integer"} if "number" in kinds(schema, self._root) else set())
        if "string" in allowed and (found := next((key for key in _COMPOSED if key in schema), "")):
            raise GrammarError(
                f"the keyword {found} is not supported where a value may be a string, which this model writes without "
                "quotes; leave it out, or give the value a type"
            )
        texts = [{**schema, "type": "string"}] if "string" in allowed else []
        return texts, [_only(schema, kind) for kind in sorted(allowed - {"string"})]

    def _split_union(self, schema: dict[str, Any], union: str, depth: int) -> tuple[list[Any], list[Any]]:
        beside = {key: value for key, value in schema.items() if key != union and key not in _NOTES}
        texts: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for branch in schema[union]:
            branch = branch if isinstance(branch, dict) else {} if branch else {"enum": []}
            if beside.keys() & branch.keys() or (beside and "$ref" in branch):
                raise GrammarError(f"a {union} beside other keywords is not supported here; put them into its options")
            more = self._split({**beside, **branch}, depth + 1)
            if union == "oneOf" and more[0] and texts:
                raise GrammarError("a oneOf with several kinds of strings is not supported here; use anyOf")
            texts += more[0]
            others += more[1]
        return texts, others


def _unlike(allowed: frozenset[str]) -> list[str]:
    """Terms for texts that don't read as values of the types ``allowed`` beside strings."""
    looks = sorted({_LOOKS[kind] for kind in allowed if kind in _LOOKS})
    terms = [f"~/[{_SPACE}]*(?:{look})[{_SPACE}]*/" for look in looks]
    if brackets := "".join(_BRACKETS[kind] for kind in sorted(allowed) if kind in _BRACKETS):
        # Not as a complement: that the rest of a long text can't fit it any more takes long to find out.
        terms.append(f"/[{_SPACE}]*(?:[^{_SPACE}{brackets}](?s:.*))?/")
    return terms


def _only(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """``schema`` for values of one type."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    found = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    if isinstance(values, list):
        same = ("number", "integer") if kind == "number" else (kind,)
        found["enum"] = [value for value in values if kind_of(value) in same]
    return {**found, "type": kind}


def _is_scalar(schema: dict[str, Any]) -> bool:
    return schema["type"] in _SCALARS


def _scalar(schema: dict[str, Any]) -> str:
    """An expression for the JSON of values of a type that has no brackets."""
    if "enum" in schema:
        return "|".join(_escaped(json.dumps(value)) for value in schema["enum"])
    if bound := next((key for key in _BOUNDS if key in schema), ""):
        raise GrammarError(
            f"the keyword {bound} is not supported where a value may be a string as well, which this model writes "
            "without quotes; leave it out, or give the value one type"
        )
    return _SCALARS[schema["type"]]


def _references(*schemas: Any) -> Iterator[Any]:
    pending = list(schemas)
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _escaped(text: str) -> str:
    return choice_rule([text])[1:-1]
