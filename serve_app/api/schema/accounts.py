"""JSON Schemas of the bodies about accounts, tokens and members. For `/openapi.json`."""

from __future__ import annotations

from typing import Any

from serve_app.api.schema.dialects import enveloped

Schema = dict[str, Any]
# Examples.
TOKEN = {"name": "ci", "policies": [{"effect": "allow", "permission_groups": [{"id": "inference"}], "resources": {}}]}
MEMBER = {"email": "ann@example.com", "roles": ["read"]}
_SCOPES: Schema = {"type": "array", "minItems": 1, "items": {"type": "string", "enum": ["inference", "read", "admin"]}}
_ROLES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {"id": {"enum": ["inference", "read", "admin"]}}, "required": ["id"]},
}
_TIME: Schema = {"type": ["string", "null"], "format": "date-time"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 120}


def object_answer() -> Schema:
    return enveloped({"type": "object"})


def text_answer() -> Schema:
    return enveloped({"type": "string"})


def list_answer() -> Schema:
    return enveloped({"type": "array", "items": {"type": "object"}})


def account_input() -> Schema:
    weight: Schema = {"type": "number", "minimum": 0.001, "maximum": 1000}
    return {
        "type": "object",
        "properties": {"name": _NAME, "weight": weight, "limits": {"type": "object"}},
        "required": ["name"],
    }


def member_input() -> Schema:
    fields = {"email": {"type": "string", "format": "email"}, "roles": _SCOPES}
    return {"type": "object", "properties": fields, "required": ["email", "roles"]}


def roles_input() -> Schema:
    return {"type": "object", "properties": {"roles": _ROLES}, "required": ["roles"]}


def token_input() -> Schema:
    return {**token_changes(), "required": ["name", "policies"]}


def token_changes() -> Schema:
    policy = {
        "type": "object",
        "properties": {"effect": {"const": "allow"}, "permission_groups": _ROLES, "resources": {"type": "object"}},
        "required": ["effect", "permission_groups"],
    }
    return {
        "type": "object",
        "properties": {
            "name": _NAME,
            "policies": {"type": "array", "minItems": 1, "items": policy},
            "scopes": _SCOPES,
            "expires_on": _TIME,
            "not_before": _TIME,
            "status": {"enum": ["active", "disabled"]},
            "priority": {"enum": ["realtime", "batch"]},
            "limits": {"type": "object"},
            "member": {"type": "string"},
        },
    }
