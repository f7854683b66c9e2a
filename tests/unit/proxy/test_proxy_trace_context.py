"""W3C Trace Context: which headers count, and what goes on."""

import pytest

from neuron_di_proxy.trace_context import new_trace, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_header_is_read_and_written_back():
    context = read_traceparent(GOOD)
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE, SPAN, True)
    assert context.header() == GOOD
    assert not read_traceparent(f"00-{TRACE}-{SPAN}-00").is_sampled


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{'０' * 31}1-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_any_other_is_none(header):
    assert read_traceparent(header) is None


def test_a_later_version_may_say_more_and_is_passed_on_as_ours():
    context = read_traceparent(f"cc-{TRACE}-{SPAN}-ff-what-will-be")
    assert context.header() == f"00-{TRACE}-{SPAN}-03"


def test_a_span_below_another_keeps_its_trace():
    above = read_traceparent(GOOD)
    below = above.below()
    assert (below.trace_id, below.parent_id, below.flags) == (TRACE, SPAN, 1)
    assert below.span_id != above.below().span_id
    assert read_traceparent(below.header()) is not None


def test_a_trace_that_begins_here_has_no_span_above():
    first, second = new_trace().below(), new_trace().below()
    assert first.trace_id != second.trace_id
    assert (first.parent_id, first.is_sampled) == ("", True)
    assert read_traceparent(first.header()).trace_id == first.trace_id
