"""Tokens that were good and are not any more, in a watch: on scripted streams."""

from contextlib import aclosing

import pytest

from neuron_di.clock import Deadline
from neuron_di.errors import PeerError, PeerGone, PeerRefused
from neuron_di.etcd import connection
from neuron_di.etcd import watch_stream as module
from neuron_di.etcd.failures import HistoryGone, PermissionDenied, failure_of
from neuron_di.etcd.key_value import KeyRange
from neuron_di.etcd.messages import WATCH
from neuron_di.etcd.packages import grpc
from neuron_di.etcd.watch_stream import watch_stream

Answer = WATCH.response


class Stream:
    """Says these messages, and then that it was ended."""

    def __init__(self, *said):
        self.said = list(said)

    async def write(self, request):
        pass

    async def read(self):
        return self.said.pop(0)

    def cancel(self):
        pass


class Scripted:
    """In place of a connection, of its member and of its calls."""

    address = "m1"
    num_attempts = 0

    def __init__(self, token, *streams):
        self.tokens = [token]
        self.streams = list(streams)

    def endpoint(self):
        return self

    def stub(self, method):
        return lambda metadata: self.streams.pop(0)

    async def token(self, endpoint, timeout_s):
        assert Deadline.after(timeout_s)
        return self.tokens[-1]

    def forget(self, token):
        assert token == self.tokens[-1]
        self.tokens.append(f"fresh-{len(self.tokens)}")

    def leave(self, endpoint):
        pass


def canceled(reason):
    return Answer(canceled=True, cancel_reason=reason)


async def follow(scripted):
    heard = []
    try:
        async with aclosing(watch_stream(scripted, KeyRange(b"/a"), 5)) as batches:
            async for batch in batches:
                heard.append(batch)  # noqa: PERF401
    except PeerError as error:
        return heard, error
    raise AssertionError("a watch that ends says why")


WORDS = [
    "etcdserver: invalid auth token",
    "etcdserver: user name is empty",
    "etcdserver: revision of auth store is old",
    "etcdserver: permission denied",
]


@pytest.mark.parametrize("token", ["", "old"])
@pytest.mark.parametrize("words", WORDS)
async def test_a_watch_that_is_refused_for_its_token_gets_a_fresh_one_once(token, words):
    scripted = Scripted(token, Stream(canceled(words)), Stream(Answer(created=True), canceled("x")))
    heard, ended = await follow(scripted)
    assert (len(heard), len(scripted.tokens), type(ended)) == (1, 2, PeerGone)
    scripted = Scripted(token, Stream(canceled(words)), Stream(canceled(words)))
    heard, ended = await follow(scripted)
    assert (heard, len(scripted.tokens)) == ([], 2)
    assert isinstance(ended, PermissionDenied if "permission" in words else PeerRefused)


@pytest.mark.parametrize("words", WORDS)
async def test_one_that_was_heard_ends_as_if_it_had_broken_and_its_token_is_forgotten(words):
    scripted = Scripted("old", Stream(Answer(created=True), canceled(words)))
    heard, ended = await follow(scripted)
    assert (len(heard), len(scripted.tokens), type(ended)) == (1, 2, PeerGone)


async def test_who_has_no_user_is_told():
    scripted = Scripted(None, Stream(canceled("etcdserver: user name is empty")))
    _, ended = await follow(scripted)
    assert "--etcd-user" in ended.message
    assert len(scripted.tokens) == 1


def test_a_revision_that_is_to_come_is_another_etcds():
    words = "etcdserver: mvcc: required revision is a future revision"
    failure = failure_of(grpc.StatusCode.OUT_OF_RANGE, words, "m1")
    assert isinstance(failure.error, HistoryGone)
    assert module.QUIET_S + module.ANSWER_S <= 7, "a frozen etcd is found by its watch"


def test_idle_channels_are_not_pinged():
    """etcd takes pings without calls for an attack, and hangs up."""
    options = dict(connection._CHANNEL_OPTIONS)
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.keepalive_time_ms"] > 5000  # its --grpc-keepalive-min-time
