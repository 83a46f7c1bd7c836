"""A GraphQL query from its text to its answer, within bounds of size, depth and work.

Cloudflare's clients are lax with the types of variables (``String``, ``string``, ``Time`` and ``DateTime`` for the same
argument), and Cloudflare is with them: what a variable is declared as is not held against where it stands. Values are
checked where they are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from inspect import isawaitable
from typing import Any

from graphql import (
    DocumentNode,
    ExecutionResult,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    GraphQLError,
    GraphQLSchema,
    InlineFragmentNode,
    OperationDefinitionNode,
    SelectionSetNode,
    execute,
    parse,
    specified_rules,
    validate,
)
from graphql.validation import VariablesInAllowedPositionRule

from serve_app.api.errors import InvalidInput
from serve_app.gateway.usage.graphql.lists import Looks, accounts, groups, requests
from serve_app.gateway.usage.graphql.schema import build_schema

# An introspection query as tools send it has about 500 tokens and is 13 fields deep; one of usage is 5 deep.
MAX_TOKENS = 3000
MAX_DEPTH = 20
MAX_FIELDS = 2000
# Lists of usage that one query may ask for, under aliases.
MAX_LISTS = 16
_LISTS = ("aiInferenceAdaptiveGroups", "aiInferenceAdaptive")


async def answer(body: Mapping[str, Any], looks: Looks) -> dict[str, Any]:
    """``{"data", "errors"}``, for a body of ``{"query", "variables", "operationName"}``. Raises `InvalidInput` for a
    body that holds no query.
    """
    text, variables, name = body.get("query"), body.get("variables"), body.get("operationName")
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput('query is missing; send {"query": "{ viewer { ... } }"}.', param="query")
    if not (variables is None or isinstance(variables, dict)) or not (name is None or isinstance(name, str)):
        raise InvalidInput("variables must be an object and operationName a string.", param="variables")
    try:
        # Comparing fields with each other takes its time.
        document = await asyncio.to_thread(checked, text)
        found = execute(_schema(), document, context_value=looks, variable_values=variables or {}, operation_name=name)
        result: ExecutionResult = await found if isawaitable(found) else found
    except GraphQLError as error:
        return _shown(None, [error])
    except _Refused as refused:
        return _shown(None, refused.errors)
    return _shown(result.data, result.errors)


class _Refused(Exception):
    def __init__(self, errors: Sequence[GraphQLError]) -> None:
        super().__init__("the query is not valid")
        self.errors = errors


def checked(text: str) -> DocumentNode:
    """The query, if it is valid and no larger than allowed. Raises :class:`GraphQLError`."""
    document = parse(text, max_tokens=MAX_TOKENS, no_location=True)
    _measure(document)
    rules = [rule for rule in specified_rules if rule is not VariablesInAllowedPositionRule]
    errors = validate(_schema(), document, rules, max_errors=5)
    if errors:
        raise _Refused(errors)
    return document


def _measure(document: DocumentNode) -> None:
    """Raises :class:`GraphQLError` for a query that is too deep, or asks for too much when fragments are put in."""
    fragments = {d.name.value: d for d in document.definitions if isinstance(d, FragmentDefinitionNode)}
    fields = lists = 0

    def walk(selected: SelectionSetNode | None, depth: int, within: tuple[str, ...]) -> None:
        nonlocal fields, lists
        if depth > MAX_DEPTH:
            raise GraphQLError(f"The query is deeper than {MAX_DEPTH} fields.")
        for node in selected.selections if selected is not None else ():
            fields += 1
            if fields > MAX_FIELDS:
                raise GraphQLError(f"The query has more than {MAX_FIELDS} fields.")
            if isinstance(node, FieldNode):
                lists += node.name.value in _LISTS
                walk(node.selection_set, depth + 1, within)
            elif isinstance(node, InlineFragmentNode):
                walk(node.selection_set, depth + 1, within)
            elif isinstance(node, FragmentSpreadNode):
                name = node.name.value
                if name in within:
                    raise GraphQLError(f"The fragment {name[:40]} contains itself.")
                if name in fragments:
                    walk(fragments[name].selection_set, depth + 1, (*within, name))

    for definition in document.definitions:
        if isinstance(definition, OperationDefinitionNode):
            walk(definition.selection_set, 1, ())
    if lists > MAX_LISTS:
        raise GraphQLError(f"The query asks for {lists} lists; at most {MAX_LISTS} at once.")


@cache
def _schema() -> GraphQLSchema:
    return build_schema(accounts, groups, requests)


def _shown(data: Any, errors: Sequence[GraphQLError] | None) -> dict[str, Any]:
    return {"data": data, "errors": [_error(error) for error in errors] if errors else None}


def _error(error: GraphQLError) -> dict[str, Any]:
    more = {"timestamp": datetime.now(UTC).isoformat(), **(error.extensions or {})}
    return {"message": error.message, "path": error.path, "extensions": more}
