"""The one error of the catalogue, and the translation of pydantic's findings into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError


class CatalogError(Exception):
    """A record or its weights cannot be used. The text names the file, the field, the reason and a remedy."""

    def __init__(self, source: Path | str, field: str, reason: str, remedy: str) -> None:
        self.source, self.field, self.reason, self.remedy = str(source), field, reason, remedy
        where = f"{source}: {field}" if field else str(source)
        super().__init__(f"{where}: {reason}. {remedy}")

    @property
    def told(self) -> str:
        """The same without the file, for who has none: paths of the machine are nobody else's business."""
        return f"{self.field}: {self.reason}. {self.remedy}" if self.field else f"{self.reason}. {self.remedy}"


def from_validation(source: Path | str, error: ValidationError, model: type[BaseModel]) -> CatalogError:
    """The first finding of a ValidationError (the others usually follow from it) as a CatalogError."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    more = len(error.errors()) - 1
    reason, remedy = explain(dict(first), _owner(model, location))
    if more:
        remedy += f" ({more} more finding{'s' if more > 1 else ''} in this file.)"
    return CatalogError(source, ".".join(location), reason, remedy)


def explain(finding: dict[str, Any], owner: type[BaseModel] | None) -> tuple[str, str]:
    """(reason, remedy) in words for one pydantic finding; `owner` is the model whose field it is about."""
    kind, context, value = finding["type"], finding.get("ctx", {}), finding.get("input")
    if kind == "extra_forbidden":
        known = ", ".join(sorted(owner.model_fields)) if owner else ""
        return "unknown key", f"Remove it or correct its spelling; known keys here: {known}."
    if kind == "missing":
        return "this key is required", "Add it to the record."
    if kind == "literal_error":
        return f"{value!r} is not one of the allowed values", f"Use {context['expected']}."
    if kind == "value_error":
        reason, _, remedy = str(context["error"]).partition("|")
        return reason.strip(), remedy.strip() or "Correct the value."
    limits = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"),
              "less_than": ("lt", "below"), "less_than_equal": ("le", "at most")}  # fmt: skip
    if kind in limits:
        key, word = limits[kind]
        return f"{value!r} is out of range", f"Use a value {word} {context[key]}."
    return f"{value!r} does not fit ({finding['msg'].lower()})", "Correct the value or its type."


def _owner(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    """The model that owns the last part of a location, found by walking the annotations."""
    current: type[BaseModel] | None = model
    in_mapping = False
    for part in location[:-1]:
        if current is None:
            return None
        field = current.model_fields.get(part)
        if field is not None and not in_mapping:
            in_mapping = get_origin(field.annotation) is dict
            current = _model_in(field.annotation)
            continue
        # A key of a mapping ("serving.local") or an index has no field of its own: the model stays the same.
        if not in_mapping and current.model_config.get("extra") == "allow":
            current = _model_in(get_type_hints(current)["__pydantic_extra__"])
        in_mapping = False
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := _model_in(argument):
            return found
    return None
