import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_pieces import cuts, json_values

from neuron_di_proxy.json_follower import JsonFollower


def follow(*pieces):
    """How many characters of the pieces were taken, and how it ended."""
    follower = JsonFollower()
    num_taken = 0
    for piece in pieces:
        stop = follower.feed(piece, 0)
        num_taken += stop
        if stop < len(piece):
            break
    end = "done" if follower.is_done else "broken" if follower.is_broken else "open"
    return num_taken, end


def written(value, **style):
    return json.dumps(value, **style)


texts_of_containers = st.builds(
    written,
    st.lists(json_values, max_size=3) | st.dictionaries(st.text(max_size=4), json_values),
    indent=st.sampled_from([None, 0, 2]),
    ensure_ascii=st.booleans(),
)


@given(cuts(texts_of_containers), st.text(max_size=3))
def test_a_value_ends_where_it_ends(cut, behind):
    text, pieces = cut
    assert follow(*pieces) == (len(text), "done")
    assert follow(*pieces[:-1], pieces[-1] + behind) == (len(text), "done")


@given(texts_of_containers, st.data())
def test_the_beginning_of_a_value_is_not_broken(text, data):
    num = data.draw(st.integers(0, len(text) - 1))
    assert follow(text[:num]) == (num, "open")


@given(cuts(st.text('{}[]":,\\u0019eE+-. \ntrufalsn', max_size=16)))
def test_it_says_what_json_says_of_any_text(cut):
    text, pieces = cut
    text, pieces = "[" + text, ["[", *pieces]
    num_taken, end = follow(text)
    assert follow(*pieces) == (num_taken, end)
    try:
        _, expected = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        assert end != "done"
    else:
        assert (num_taken, end) == (expected, "done")


@pytest.mark.parametrize(
    ("text", "num_taken"),
    [
        ("[01]", 2),
        ("[00]", 2),
        ("[-]", 2),
        ("[1.]", 3),
        ("[1e]", 3),
        ("[.5]", 1),
        ("[NaN]", 1),
        ("[nul]", 4),
        ("[truex]", 5),
        ("[1,]", 3),
        ("{,}", 1),
        ('{"a":1,}', 7),
        ('{"a" 1}', 5),
        ("{a:1}", 1),
        ('["\n"]', 2),
        (r'["\x"]', 3),
        (r'["\u12g4"]', 6),
        ("[}", 1),
        ("[1 2]", 3),
        ("<", 0),
        (" 1", 0),
    ],
)
def test_it_stops_at_the_character_that_breaks_it(text, num_taken):
    assert follow(text) == (num_taken, "broken")
    assert follow(*text) == (num_taken, "broken")


@pytest.mark.parametrize("number", ["0", "-0", "12", "1.5", "-1.5e-7", "2E+3", "0e0"])
def test_a_number_at_the_top_ends_before_what_follows(number):
    assert follow(number + ",") == (len(number), "done")
    assert follow(number) == (len(number), "open")
