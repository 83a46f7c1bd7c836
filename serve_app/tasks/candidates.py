"""Classes that a client names (zero-shot): how tasks that sort texts and pictures read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import refuse, string, text
from serve_app.api.schema.parts import Schema, field

LABELS, TEMPLATE = "candidate_labels", "hypothesis_template"
MOST_LABELS = 64
MOST_CHARS = 500
PLACE = "{}"


@dataclass(slots=True, frozen=True)
class Candidates:
    """``labels`` as the answer tells them, each of which stands in ``template`` where :data:`PLACE` is."""

    labels: tuple[str, ...]
    template: str

    @property
    def sentences(self) -> list[str]:
        return [self.template.replace(PLACE, label) for label in self.labels]


def read_candidates(body: dict[str, Any], template: str) -> Candidates | None:
    """The classes that ``body`` names, if it does. Raises `InvalidInput`."""
    named = body.get(LABELS)
    given = string(body, TEMPLATE, limit=MOST_CHARS)
    if named is None:
        if given is not None:
            raise InvalidInput(f"{TEMPLATE} is for {LABELS}, which are missing.", param=LABELS)
        return None
    if not isinstance(named, list) or not 0 < len(named) <= MOST_LABELS:
        raise refuse(LABELS, f"an array of 1 to {MOST_LABELS} strings", named)
    labels = [text(label, f"{LABELS}[{i}]", limit=MOST_CHARS) for i, label in enumerate(named)]
    for i, label in enumerate(labels):
        if not label.strip():
            raise InvalidInput(f"{LABELS}[{i}] must not be empty.", param=LABELS)
        if label in labels[:i]:
            raise InvalidInput(f"{LABELS}[{i}] is there twice: {label!r}.", param=LABELS)
    if given is not None and PLACE not in given:
        raise InvalidInput(f"{TEMPLATE} must have {PLACE} where the label belongs.", param=TEMPLATE)
    return Candidates(tuple(labels), template if given is None else given)


def candidate_fields(template: str, which: str) -> Schema:
    """Their JSON Schema. ``which``: the models that take them."""
    label = {"type": "string", "minLength": 1, "maxLength": MOST_CHARS}
    return {
        LABELS: field(
            "array", f"The classes, for {which}.", items=label, minItems=1, maxItems=MOST_LABELS, uniqueItems=True
        ),
        TEMPLATE: field(
            "string", f"The sentence that a class makes, with {PLACE} in its place.", default=template,
            maxLength=MOST_CHARS,
        ),
    }  # fmt: skip
