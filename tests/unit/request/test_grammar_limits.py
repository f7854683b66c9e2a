"""Schemas that ask for much: what is followed, what is refused, and whose fault it is."""

import numpy as np
import pytest
from grammar_kit import EOS, Kit

from neuron_di.errors import BadRequest
from neuron_di.request.schema_refusal import PROPERTIES_MAX, _nested_repeats


@pytest.fixture(scope="module")
def kit():
    return Kit()


def feed(state, token_ids):
    for token_id in token_ids:
        state.accept(token_id)


EXPLODING = {"type": "string", "pattern": "^(.*[ab].{300}){3}$"}  # by the lexer's states


def exhaust(kit, state, seed=0, num_tokens=400):
    """Write whatever is allowed. True: the library came to a limit."""
    random = np.random.default_rng(seed)
    for _ in range(num_tokens):
        try:
            allowed = sorted(kit.allowed(state) - {EOS})
            if state.accept(int(random.choice(allowed))):
                return False
        except BadRequest as refused:
            return "too complex" in refused.message
    return False


def test_a_limit_of_the_library_is_the_requests_fault_on_both_sides():
    """A decode worker, which never asked for the token it is given, blames no peer."""
    kit = Kit()
    given = [kit.schema(EXPLODING) for _ in range(3)]
    assert any(exhaust(kit, kit.schema(EXPLODING), seed) for seed in range(60))
    for state in given:
        with pytest.raises(BadRequest, match="too complex"):
            feed(state, kit.ids('"' + "bca" * 300))


def test_a_grammar_that_came_to_a_limit_is_compiled_anew():
    kit = Kit()
    assert any(exhaust(kit, kit.schema(EXPLODING), seed) for seed in range(60))
    before = kit.compiler.num_compiled
    state = kit.schema(EXPLODING)
    assert kit.compiler.num_compiled == before + 1
    kit.write(state, '"bca')


def test_no_grammar_that_came_to_a_limit_is_kept_beside_another():
    kit = Kit()
    assert any(exhaust(kit, kit.schema(EXPLODING), seed) for seed in range(60))
    assert [each.is_spent for each in kit.compiler._compiled.values()] == [True]
    kit.schema({"type": "null"})
    assert [each.is_spent for each in kit.compiler._compiled.values()] == [False]


@pytest.mark.parametrize(
    ("pattern", "product"),
    [
        ("a", 1),
        ("a{3}b{5}", 5),
        ("(a{2}b){3}", 6),
        ("((a{2}|b{7}){3}c)+", 21),
        ("(a{2}){3}{4}", 24),
        ("(?:a{2,}){0,5}", 10),
        (r"[({9}]\(\{9\p{L}{4}", 4),
        ("a{0}", 1),
        ("(((", 1),
        (")))a{2}", 2),
        ("a{" + "9" * 5000 + "}", 999_999_999),
    ],
)
def test_counts_in_counts_multiply(pattern, product):
    assert _nested_repeats(pattern) == product


def test_grammar_bombs_are_refused_before_they_are_compiled(kit):
    bomb = "^(((a{900}){1000}){1000})$"
    for schema in (
        {"type": "string", "pattern": bomb},
        {"type": "string", "pattern": "^(a{101}){200}$"},
        {"items": [{"patternProperties": {bomb: {}}}]},
    ):
        with pytest.raises(BadRequest, match="`pattern` repeats"):
            kit.schema(schema)
    with pytest.raises(BadRequest, match="`pattern` is longer"):
        kit.schema({"type": "string", "pattern": "(a*)*" * 900})
    many = {f"p{i}": {} for i in range(PROPERTIES_MAX // 2 + 1)}
    nested = {"properties": {"a": {"properties": many}, "b": {"properties": many}}}
    with pytest.raises(BadRequest, match="more than 2000 `properties`"):
        kit.schema(nested)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"multipleOf": 9967}, {"multipleOf": 9949}]},
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"properties": {"p": {"multipleOf": 997}}, "patternProperties": {"p": {"multipleOf": 991}}},
        {"type": "integer", "allOf": [{"multipleOf": 7}, {"multipleOf": 10**6}]},
        {"type": "integer", "multipleOf": 999_983},
        {"items": {"multipleOf": 9999.91}},
        {"multipleOf": 3e300},
        {"multipleOf": int("9" * 400)},
    ],
)
def test_a_multiple_that_keeps_the_library_at_work_is_refused(kit, schema):
    """Minutes for seven digits, in which no other grammar is compiled."""
    with pytest.raises(BadRequest, match="`multipleOf` is too large"):
        kit.schema(schema)


def test_multiples_are_counted_before_anything_is_made_of_them(kit):
    """The least common multiple of thousands of long numbers is itself the work of seconds."""
    long = [{"multipleOf": float(f"1.{n:015}1e300")} for n in range(100)]
    with pytest.raises(BadRequest, match="more than 64 `pattern`, `format` and `multipleOf`"):
        kit.schema({"anyOf": long})


@pytest.mark.parametrize("multiple", [5, 2.5, 60, 3600, 86_400, 0.01])
def test_multiples_that_people_ask_for_are_fine(kit, multiple):
    kit.write(kit.schema({"type": "number", "multipleOf": multiple}), "0")
    many = [{"type": "number", "multipleOf": each} for each in (multiple, 0.1, 10, 900, 4.5)]
    kit.schema({"properties": {f"p{n}": schema for n, schema in enumerate(many)}})
    kit.schema({"type": "integer", "multipleOf": 10**9})


def test_many_choices_and_many_properties_are_fine(kit):
    choices = [f"{n:x}!" for n in range(8000)]
    state = kit.choice(*choices)
    kit.write(state, choices[-1])
    assert kit.allowed(state) == {EOS}
    state = kit.schema({"properties": {f"p{n}": {"type": "null"} for n in range(500)}})
    kit.write(state, '{"p499":null, "other": 1}')
    assert kit.allowed(state) == {EOS}


def test_a_choice_may_hold_any_character(kit):
    for text in ("/x\x7f", "\x80\x85\x9f", "\0\t\n\x1f", "\u2028\ufeff", '\\"\\u007f', "'`/#"):
        state = kit.choice(text, "other")
        kit.write(state, text)
        assert kit.allowed(state) == {EOS}
