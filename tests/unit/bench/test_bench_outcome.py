import math
from array import array

import pytest
from bench_kit import DONE, event, usage

from neuron_di.bench.client import Heard
from neuron_di.bench.outcome import Expected, read_outcome

SHORT = Expected(2, is_exact=False)
EXACT = Expected(2, is_exact=True)


def heard(*pieces, end="whole", status=200, why=""):
    times_s = array("d", [10.0 + at for at in range(len(pieces))])
    return Heard(end=end, status=status, pieces=list(pieces), times_s=times_s, end_s=99.0, why=why)


def chat(**fields) -> bytes:
    import json

    finish_reason = fields.pop("finish_reason", None)
    choice = {"index": 0, "delta": fields, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def test_a_whole_answer():
    found = read_outcome(heard(event("a"), event("b", "length"), usage(7, 2) + DONE), EXACT)
    assert (found.ending, found.first_s, found.last_s, found.end_s) == ("ok", 10, 11, 99)
    assert (found.prompt_tokens, found.output_tokens, found.num_chunks) == (7, 2, 2)
    assert list(found.gaps_s) == [1.0]


def test_events_of_one_packet_have_its_time():
    found = read_outcome(heard(event("a") + event("b"), usage(7, 2) + DONE), EXACT)
    assert list(found.gaps_s) == [0.0]


def test_an_event_in_two_packets_came_with_the_second():
    one = event("a")
    found = read_outcome(heard(one[:9], one[9:] + event("b"), usage(7, 2) + DONE), EXACT)
    assert (found.ending, found.first_s) == ("ok", 11)


def test_lines_may_end_as_in_windows_and_comments_are_none():
    pieces = [b": ping\r\n\r\n", event("a").replace(b"\n", b"\r\n"), event("b"), usage(1, 2) + DONE]
    assert read_outcome(heard(*pieces), EXACT).ending == "ok"


def test_without_usage_chunks_are_counted():
    found = read_outcome(heard(event("a"), event("b"), event("", "stop"), DONE), EXACT)
    assert (found.ending, found.output_tokens, found.prompt_tokens) == ("ok", 2, 0)


def test_a_token_without_text_is_a_token_and_an_end_without_text_is_none():
    found = read_outcome(
        heard(event(""), event("é"), event("", "length"), usage(1, 2), DONE), EXACT
    )
    assert (found.num_chunks, found.first_s) == (2, 10)


def test_of_a_chat_neither_the_role_nor_the_end_is_a_token():
    pieces = [chat(role="assistant", content=""), chat(content="a"), chat(reasoning_content="b"),
              chat(content="", finish_reason="stop"), usage(1, 2), DONE]  # fmt: skip
    found = read_outcome(heard(*pieces), EXACT)
    assert (found.ending, found.first_s, found.num_chunks) == ("ok", 11, 2)


@pytest.mark.parametrize("none", [None, []])
def test_no_calls_of_tools_are_no_token(none):
    pieces = [chat(role="assistant", content="", tool_calls=none), chat(content="a"),
              chat(content="b", tool_calls=none),
              chat(content=None, tool_calls=none, finish_reason="stop"),
              usage(1, 2), DONE]  # fmt: skip
    found = read_outcome(heard(*pieces), EXACT)
    assert (found.ending, found.first_s, found.num_chunks) == ("ok", 11, 2)


def test_calls_of_tools_are_tokens():
    pieces = [chat(role="assistant", tool_calls=[{"index": 0}]), chat(tool_calls=[{}]), usage(1, 2)]
    assert read_outcome(heard(*pieces, DONE), EXACT).first_s == 10


@pytest.mark.parametrize(
    ("status", "ending"),
    [(429, "refused_429"), (503, "refused_503"), (500, "refused"), (404, "refused")],
)
def test_refusals_by_status(status, ending):
    body = b'{"error": {"message": "not now", "code": 1}}'
    found = read_outcome(heard(body, status=status), EXACT)
    assert (found.ending, found.why) == (ending, f"status {status}: not now")
    assert math.isnan(found.first_s)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff", b'{"error": null}'])
def test_a_refusal_without_words(body):
    assert read_outcome(heard(body, status=500), EXACT).why == "status 500"


@pytest.mark.parametrize(
    "error", [b'{"error": {"message": "broke"}}', b'{"error": "broke"}', b'{"message": "broke"}']
)
def test_an_error_within_the_stream(error):
    found = read_outcome(heard(event("a"), b"data: " + error + b"\n\n", DONE), EXACT)
    assert (found.ending, found.why, found.num_chunks) == ("error_event", "broke", 1)


def test_an_error_goes_before_the_cut_that_follows_it():
    error = b'data: {"error": {"message": "broke"}}\n\n'
    assert read_outcome(heard(event("a"), error, end="cut"), EXACT).ending == "error_event"


def test_cuts():
    assert read_outcome(heard(event("a"), end="cut", why="reset"), EXACT).why == "reset"
    without_done = read_outcome(heard(event("a"), usage(1, 2)), EXACT)
    assert (without_done.ending, without_done.why) == ("cut", "the response ended without [DONE]")


@pytest.mark.parametrize(
    ("num", "finish_reason", "expected", "ending"),
    [
        (2, "length", EXACT, "ok"),
        (1, "stop", EXACT, "wrong_tokens"),
        (3, "length", EXACT, "wrong_tokens"),
        (1, "stop", SHORT, "ok"),
        (1, "length", SHORT, "wrong_tokens"),
        (3, "stop", SHORT, "wrong_tokens"),
        (0, "stop", SHORT, "wrong_tokens"),
    ],
)
def test_the_number_of_tokens(num, finish_reason, expected, ending):
    pieces = [event("a"), event("b", finish_reason), usage(1, num), DONE]
    assert read_outcome(heard(*pieces), expected).ending == ending


def test_an_answer_without_a_token_is_none():
    assert read_outcome(heard(event("", "stop"), DONE), SHORT).ending == "wrong_tokens"


@pytest.mark.parametrize("data", [b"{", b"7", b'{"choices": 3}', b"\xff"])
def test_what_is_no_chunk(data):
    found = read_outcome(heard(event("a"), b"data: " + data + b"\n\n", DONE), EXACT)
    assert found.ending == "bad_answer"


def test_timeouts_and_lost_connections():
    timeout = read_outcome(heard(event("a"), end="timeout", why="slow"), EXACT)
    assert (timeout.ending, timeout.first_s) == ("timeout", 10)
    assert read_outcome(Heard(end="timeout", why="slow"), EXACT).ending == "timeout"
    assert read_outcome(Heard(end="connection", why="refused"), EXACT).ending == "connection"
