import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_pieces import cuts, json_values

from neuron_di_proxy.call_reader import CallReader
from neuron_di_proxy.message_parts import MessageParts

NAMES = ("weather", "f")
FORMATS = ("hermes", "mistral", "llama3_json", "array")


class Joined:
    """What all parts of an answer are together, as a client puts them together."""

    def __init__(self, parts):
        self.content = "".join(part.content for part in parts)
        self.calls = []
        for part in parts:
            for call in part.calls:
                if call.name is not None:
                    assert call.index == len(self.calls)
                    self.calls.append([call.name, ""])
                self.calls[call.index][1] += call.arguments

    def __eq__(self, other):
        return (self.content, self.calls) == (other.content, other.calls)

    def __repr__(self):
        return f"{self.content!r} {self.calls}"


def read(call_format, *pieces, is_parallel=True):
    reader = CallReader(call_format, NAMES, is_parallel=is_parallel)
    parts = []
    for piece in pieces:
        parts.append(MessageParts())
        reader.feed(piece, parts[-1])
    parts.append(MessageParts())
    reader.end(parts[-1])
    return Joined(parts), reader


def result(call_format, text, **options):
    joined, reader = read(call_format, text, **options)
    split, other = read(call_format, *text, **options)
    assert split == joined
    assert (other.num_calls, other.all_whole) == (reader.num_calls, reader.all_whole)
    assert reader.num_calls == len(joined.calls)
    return joined.content, [tuple(call) for call in joined.calls], reader.all_whole


ONE = '{"name": "f", "arguments": {"a":  [1, "}"]}}'
F = ("f", '{"a":  [1, "}"]}')


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [F]),
        ("hermes", f"Hm. <tool_call>{ONE}</tool_call>", "Hm. ", [F]),
        ("hermes", f"\n\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>\n", "", [F, F]),
        ("hermes", f"<tool_call>{ONE}</tool_call> So.", " So.", [F]),
        ("hermes", f"Hm.\n<tool_call>\n{ONE}\n</tool_call>\nSo.", "Hm.\n\nSo.", [F]),
        ("hermes", f"<tool_call>{ONE}", "", [F]),
        ("hermes", f"<tool_call>{ONE}<tool_call>{ONE}", "", [F, F]),
        ("hermes", f"<tool_call>{ONE[:-1]}</tool_call>", "", [F]),  # a bracket too few
        ("hermes", "<tool_call>" + '{"arguments": {}, "id": 7, "name": "f"}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"type": "", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", [F, F]),
        ("mistral", f"Hm.[TOOL_CALLS] [{ONE}]\n", "Hm.", [F]),
        ("mistral", f"[TOOL_CALLS][{ONE}", "", [F]),
        ("llama3_json", ONE, "", [F]),
        ("llama3_json", f" {ONE} ", "", [F]),
        ("llama3_json", f"<|python_tag|>{ONE}; {ONE}", "", [F, F]),
        ("llama3_json", f"{ONE} {ONE}", "", [F, F]),
        ("llama3_json", f"{ONE} and so on", " and so on", [F]),
        ("array", f"[{ONE}]", "", [F]),
        ("array", f" [ {ONE} , {ONE} ] ", "", [F, F]),
        ("array", f"[{ONE}] [{ONE}]", f" [{ONE}]", [F]),
    ],
)  # fmt: skip
def test_calls_are_found(call_format, text, content, calls):
    assert result(call_format, text) == (content, calls, True)


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", ""),
        ("hermes", " \n "),
        ("hermes", "no call"),
        ("hermes", "<tool_call>"),
        ("hermes", "half <tool_ca"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", "<tool_call>f(1)</tool_call>"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "f"}</tool_call>'),
        ("hermes", ' <tool_call> {"name": "f", "argu'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}'),
        ("llama3_json", "Hi {"),
        ("llama3_json", '{"name": "Bob", "age": 7}'),
        ("llama3_json", f"see: {ONE}"),
        ("llama3_json", "; ;"),
        ("array", "[]"),
        ("array", "[1]"),
        ("array", ONE),
    ],
)
def test_what_is_no_call_stays_text(call_format, text):
    assert result(call_format, text) == (text, [], True)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        # Broken in its arguments, after they were given on.
        ('<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>',
         "b}}</tool_call>", [("f", '{"a": ')]),
        # Not written to its end.
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
        # A later call can be found nonetheless, and a broken one before it shows.
        (f'<tool_call>{{"name": "f", "arguments": {{"a" 1<tool_call>{ONE}',
         "1", [("f", '{"a" '), F]),
    ],
)  # fmt: skip
def test_a_call_that_breaks_late_is_cut(text, content, calls):
    assert result("hermes", text) == (content, calls, False)


def test_without_parallel_calls_there_is_one():
    text = f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>"
    expected = (f"\n<tool_call>{ONE}</tool_call>", [F], True)
    assert result("hermes", text, is_parallel=False) == expected
    assert result("array", f"[{ONE},{ONE}]", is_parallel=False) == (f",{ONE}]", [F], True)
    assert result("llama3_json", f"{ONE};{ONE}", is_parallel=False) == (f";{ONE}", [F], True)


def test_arguments_are_given_on_as_they_come():
    reader = CallReader("hermes", NAMES, is_parallel=True)
    seen = []
    for piece in (
        "<tool",
        '_call>{"name": "weather"',
        ', "arguments": {"ci',
        'ty": "Ul',
        'm"}',
        "}</",
    ):
        parts = MessageParts()
        reader.feed(piece, parts)
        seen.append([(call.index, call.name, call.arguments) for call in parts.calls])
    assert seen == [
        [],
        [],
        [(0, "weather", '{"ci')],
        [(0, None, 'ty": "Ul')],
        [(0, None, 'm"}')],
        [],
    ]


def test_text_that_cannot_be_a_tag_is_given_on_at_once():
    reader = CallReader("hermes", NAMES, is_parallel=True)
    seen = []
    for piece in ("a", " ", "<", "b <tool", "s", "<tool_call"):
        parts = MessageParts()
        reader.feed(piece, parts)
        seen.append(parts.content)
    assert seen == ["a", " ", "", "<b ", "<tools", ""]


fragments = st.sampled_from(
    [
        ONE, '{"name": "weather", "arguments": {"k": "v', '"}}', '{"name": "x", "arguments": {}}',
        '{"arguments": {"x": null}, "name": "f"}', "<tool_call>", "</tool_call>", "<tool", "_call>",
        "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "[", "]", ",", ";", " ", "\n", "{", "}", '"',
        "\\", "text", "é€😀", "<", "0",
    ]
)  # fmt: skip
any_answer = st.lists(fragments, max_size=10).map("".join)


@given(st.sampled_from(FORMATS), cuts(any_answer), st.booleans())
def test_how_the_text_is_split_changes_nothing(call_format, cut, is_parallel):
    text, pieces = cut
    whole, reader = read(call_format, text, is_parallel=is_parallel)
    split, other = read(call_format, *pieces, is_parallel=is_parallel)
    assert split == whole
    assert other.all_whole == reader.all_whole
    if not whole.calls:  # of a forced call that was cut, what was begun is no text
        assert whole.content == text or (call_format == "array" and whole.content == "")
    if not is_parallel:
        assert len(whole.calls) <= 1
    for name, arguments in whole.calls:
        assert name in NAMES
        assert arguments in text
    if reader.all_whole:
        assert all(type(json.loads(arguments)) is dict for _, arguments in whole.calls)


@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), json_values)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_every_call_arrives_byte_for_byte(call_format, wanted, indent, ensure_ascii):
    expected = [
        (name, json.dumps(arguments, indent=indent, ensure_ascii=ensure_ascii))
        for name, arguments in wanted
    ]
    key = "parameters" if call_format == "llama3_json" else "arguments"
    calls = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in expected]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
        "mistral": f"[TOOL_CALLS] [{', '.join(calls)}]",
        "llama3_json": "; ".join(calls),
        "array": f"[{','.join(calls)}]",
    }[call_format]
    assert result(call_format, text) == ("", expected, True)
