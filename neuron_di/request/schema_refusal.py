"""Why a JSON Schema cannot be followed, told without repeating anything of what it says.

The grammar library's own messages quote the schema, which is a client's: only words of JSON
Schema itself are taken from them.
"""

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NoReturn

from neuron_di.errors import BadRequest

_KEYWORDS = frozenset(
    """
    $anchor $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema
    additionalItems additionalProperties allOf anyOf const contains dependencies
    dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if
    items maxContains maxItems maxLength maxProperties maximum minContains minItems minLength
    minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems properties
    propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems
    """.split()  # noqa: SIM905
)

# Common ones that the library may not know: JSON Schema's, OpenAPI's, pydantic's, zod's.
_FORMATS = frozenset(
    """
    base64 base64url binary byte char cidrv4 cidrv6 cuid cuid2 decimal directory-path e164 emoji
    file-path idn-email idn-hostname ipv4interface ipv4network ipv6interface ipv6network
    ipvanyaddress ipvanyinterface ipvanynetwork iri iri-reference json-pointer json-string jwt
    multi-host-uri nanoid password path regex relative-json-pointer ulid uri-reference
    uri-template url
    """.split()  # noqa: SIM905
)

# What the library's message begins with, and what the client is told then.
_REASONS = (
    ("Unimplemented keys", "it uses what is not supported: {keywords}"),
    ("Unknown format", "it uses a `format` that is not supported{of_format}"),
    ("oneOf constraints", "it uses `oneOf` with branches that may overlap; use `anyOf`"),
    (
        "min/maxProperties",
        "it uses `minProperties` or `maxProperties` where not all `properties` are `required`",
    ),
    ("patternProperty regexes", "the expressions of its `patternProperties` overlap"),
    ("regex parse error", "a `pattern` is not a regular expression that is supported"),
    ("lookarounds not supported", "a `pattern` uses look-around, which is not supported"),
    ("Pointer", "a `$ref` leads nowhere"),
    ("Resource", "it refers to another document, by `$ref` or `$schema`"),
    ("Value for 'multipleOf'", "a `multipleOf` has too many digits"),
    ("Failed to generate regex for", "the range of a number is too large for what is supported"),
    ("Unsatisfiable schema", "nothing can satisfy it"),
    ("schema too large", "it is too large"),
    ("Invalid type", "it names a `type` that JSON has not"),
    ("fuel exhausted", "it is too complex"),
    ("Expected", "the value of a keyword is of the wrong type: {keywords}"),
)
EXPRESSIONS_MAX = 64
INTERSECTED_MAX = 8  # where some of them may have to hold together
EXPRESSION_CHARS_MAX = 4096  # the library takes seconds for some that are ten times as long
REPEATS_MAX = 20_000  # of one expression: the product of counts that stand in each other
PROPERTIES_MAX = 2000  # in all: the work grows with their square
# The library tries all remainders of a `multipleOf`, each of which takes some 15 us.
REMAINDERS_MAX = 100_000

# What matters for repetition: escapes and classes as one, counts, and any other character.
_PIECE = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[(?P<chars>\^?\]?(?:\\.|[^\]\\])*)\]"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.",
    re.DOTALL,
)
# Plain characters of a class to JSON Schema and to Python, and to the library an operation on two
# classes: it would leave out what may come, and let come what may not. Not `[:alpha:]`.
_OPERATION = re.compile(r"\[(?!:)|&&|--|~~")
_OPERATES = "has `[`, `&&`, `--` or `~~` in a class: put a backslash before what is meant as itself"
_EXACT_MAX = 1 << 53  # the library has numbers as doubles, as most readers of JSON have
# What 64 bits hold, which is meant as that range, and not to the last unit.
_RANGES = ((1 << 63) - 1, (1 << 64) - 1)
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DIGITS = 9  # of a count that are read: more are far beyond every limit

_EXPRESSIONS = ("pattern", "format", "multipleOf")
_APPLIED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
     "examples", "title"}
)  # fmt: skip
_PLAIN_VALUES = frozenset({"const", "default", "enum", "examples"})  # which are no schemas
# As JSON: what no short escape writes, and DEL. The library would leave it out of answers.
_UNWRITABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")
_OTHER = "it is not well-formed, or too complex"


def refusal_of(message: str) -> str:
    """What a client is told when the library refused its schema with this message."""
    words = re.findall(r"""['"`](\$?[A-Za-z]+)['"`]""", message)
    keywords = ", ".join(dict.fromkeys(word for word in words if word in _KEYWORDS))
    value = message.partition("\n")[0].partition(": ")[2]
    of_format = f": {value}" if value in _FORMATS else ""
    for beginning, reason in _REASONS:
        if message.startswith(beginning):
            told = reason.format(keywords=keywords or "?", of_format=of_format)
            return f"the schema cannot be followed: {told}"
    return f"the schema cannot be followed: {_OTHER}"


def check_expression(expression: str, *, param: str) -> None:
    """Refuse a regular expression that would keep the library at work."""
    if fault := _fault_of(expression):
        raise BadRequest(f"the expression {fault}", param=param)


def expression_refusal_of(message: str) -> str:
    """What a client is told when the library refused its expression with this message."""
    if "lookarounds not supported" in message or "look-around" in message:
        return "the expression uses look-around or the borders of words, which are not supported"
    return "the expression is not a regular expression that is supported, or is too complex"


def check_schema(schema: dict[str, Any], *, param: str) -> None:
    """Refuse what the library takes but does not keep, or for long. `schema` is decoded JSON.

    It lets a further property come twice, so that it counts more of them than there are. And
    where expressions must hold together, its work doubles with each, beyond all its own limits.
    """
    left: list[Any] = [schema]
    num_expressions = num_properties = 0
    multiples: list[int] = []
    intersects = False
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            least, required = part.get("minProperties"), part.get("required")
            num_required = len(required) if isinstance(required, list) else 0
            if isinstance(least, int | float) and least > max(num_required, 1):
                _refuse("`minProperties` is more than the number of its `required`", param)
            _check_texts(part, param)
            _check_numbers(part, param)
            multiples += _multiple_of(part)
            num_expressions += sum(keyword in part for keyword in _EXPRESSIONS)
            by_pattern = part.get("patternProperties")
            if isinstance(by_pattern, dict):
                num_expressions += len(by_pattern)
                _check_expressions(by_pattern, param)
            _check_expressions([part.get("pattern")], param)
            properties = part.get("properties")
            num_properties += len(properties) if isinstance(properties, dict) else 0
            intersects = intersects or _intersects(part)
            left += [value for key, value in part.items() if key not in _PLAIN_VALUES]
    if num_properties > PROPERTIES_MAX:
        _refuse(f"it has more than {PROPERTIES_MAX} `properties`", param)
    expressions_max = INTERSECTED_MAX if intersects else EXPRESSIONS_MAX
    if num_expressions > expressions_max:
        joint = ", joined by `allOf` or beside `$ref` or `anyOf`" if intersects else ""
        names = "`pattern`, `format` and `multipleOf`"
        _refuse(f"it has more than {expressions_max} {names}{joint}", param)
    # Several may hold together, or one of them: then it tries what is left over by each. They are
    # few by now: the common multiple of thousands would itself take long.
    if not all(map(_is_power_of_ten, multiples)) and math.lcm(*multiples) > REMAINDERS_MAX:
        _refuse("its `multipleOf` is too large, or the common multiple of all of them", param)


def _check_texts(part: dict[str, Any], param: str) -> None:
    texts = [part.get(keyword) for keyword in ("const", "enum", "pattern", "required")]
    for keyword in ("properties", "patternProperties"):
        texts += list(part[keyword]) if isinstance(part.get(keyword), dict) else []
    try:
        is_unwritable = _UNWRITABLE.search(json.dumps(texts))
    except RecursionError:
        _refuse("a value in it is nested too deeply", param)
    if is_unwritable:
        _refuse("a text in it holds a control character that answers cannot have", param)


def _check_numbers(part: dict[str, Any], param: str) -> None:
    left = [part.get("const"), part.get("enum")]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float) and abs(value) > _EXACT_MAX:
            _refuse("a number in its `const` or `enum` is beyond 2**53: write it as a text", param)
    for keyword in _LIMITS:
        limit = part.get(keyword)
        if not isinstance(limit, int) or abs(limit) <= _EXACT_MAX or limit in _RANGES:
            continue
        if abs(limit) > max(_RANGES) or int(float(limit)) != limit:
            _refuse(f"its `{keyword}` is beyond 2**53 and would be rounded", param)


def _multiple_of(part: dict[str, Any]) -> list[int]:
    """A part's `multipleOf`, if it has one, without its decimal point: 25 for 0.25."""
    multiple = part.get("multipleOf")
    if type(multiple) is int and multiple:
        return [min(abs(multiple), _EXACT_MAX + 1)]
    if not isinstance(multiple, float) or not multiple:
        return []
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int), "JSON has no infinity"
    return [int("".join(map(str, digits))) * 10 ** max(exponent, 0)]


def _is_power_of_ten(number: int) -> bool:
    """Whose multiples are known by their last digits: there are no remainders to be tried."""
    return str(number).strip("0") == "1"


def _check_expressions(expressions: Iterable[Any], param: str) -> None:
    for expression in expressions:
        if isinstance(expression, str) and (fault := _fault_of(expression)):
            _refuse(f"a `pattern` {fault}", param)


def _fault_of(expression: str) -> str:
    if len(expression) > EXPRESSION_CHARS_MAX:
        return f"is longer than {EXPRESSION_CHARS_MAX} characters"
    if _nested_repeats(expression) > REPEATS_MAX:
        return f"repeats something more than {REPEATS_MAX} times"
    return _OPERATES if _has_operation(expression) else ""


def _has_operation(expression: str) -> bool:
    """Whether the library would compute with classes, where others read plain characters."""
    for piece in _PIECE.finditer(expression):
        plain = re.sub(r"\\.", "a", piece["chars"] or "", flags=re.DOTALL)
        if _OPERATION.search(plain):
            return True
    return False


def _nested_repeats(expression: str) -> int:
    """The largest product of counts that stand in each other: 6 for `(a{2}b){3}`."""
    in_groups = [1]  # the largest product in each open group, the outermost first
    last = 1  # of what a count would repeat
    for piece in _PIECE.finditer(expression):
        text = piece.group()
        if piece["least"]:
            last *= max(int((piece["most"] or piece["least"])[:_DIGITS]), 1)
        elif text == "(":
            in_groups.append(1)
            last = 1
        elif text == ")" and len(in_groups) > 1:
            last = in_groups.pop()
        elif text not in "*+?":
            last = 1
        in_groups[-1] = max(in_groups[-1], last)
    return max(in_groups)


def _intersects(part: dict[str, Any]) -> bool:
    """Whether a value must keep two schemas at once."""
    branches = part.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        return True
    return bool(part.keys() & _APPLIED) and len(part.keys() - _ANNOTATIONS) > 1


def _refuse(reason: str, param: str) -> NoReturn:
    raise BadRequest(f"the schema cannot be followed: {reason}", param=param)
