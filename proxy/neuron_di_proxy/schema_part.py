"""A JSON Schema within another one: its references must find what they meant."""

from collections.abc import Callable, Iterable
from typing import Any

# Where a JSON Schema holds values, which may look like schemas, and where it holds schemas by name.
_VALUE_KEYS = ("const", "enum", "default", "examples")
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def as_part(schema: dict[str, Any], base: str) -> Any:
    """`schema` as a part of another one, at `base`: references to its own parts still find them.

    Its name and its anchors do not come along: other tools' may be the same.
    """
    name = schema.get("$id")
    schema = {key: value for key, value in schema.items() if key != "$id"}
    anchors: dict[str, str] = {}

    def found(reference: str) -> str:
        if isinstance(name, str) and (reference == name or reference.startswith(name + "#")):
            reference = reference.removeprefix(name) or "#"
        if reference == "#" or reference.startswith("#/"):
            return base + reference[1:]
        return anchors.get(reference[1:], reference) if reference.startswith("#") else reference

    _find_anchors(schema, base, anchors)
    return _with_references(schema, found)


def _find_anchors(schema: Any, place: str, anchors: dict[str, str]) -> None:
    """Where in a schema, which is at `place`, each `$anchor` stands."""
    for key, part in _parts(schema):
        if key == "$anchor" and isinstance(part, str):
            anchors[part] = place
        escaped = key.replace("~", "~0").replace("/", "~1")
        if key in _NAMED_SCHEMAS and isinstance(part, dict):
            for name, each in _parts(part):
                within = name.replace("~", "~0").replace("/", "~1")
                _find_anchors(each, f"{place}/{escaped}/{within}", anchors)
        elif key not in _VALUE_KEYS:
            _find_anchors(part, f"{place}/{escaped}", anchors)


def _parts(schema: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(schema, list):
        return ((str(index), each) for index, each in enumerate(schema))
    return schema.items() if isinstance(schema, dict) else ()


def _with_references(schema: Any, found: Callable[[str], str]) -> Any:
    """A copy in which each reference says where it is found now."""
    if isinstance(schema, list):
        return [_with_references(each, found) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = found(value)
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _with_references(each, found) for name, each in value.items()}
        elif key in _VALUE_KEYS:
            moved[key] = value
        elif key != "$anchor" or not isinstance(value, str):
            moved[key] = _with_references(value, found)
    return moved
