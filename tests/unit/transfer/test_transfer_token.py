import threading

import pytest

from neuron_di.errors import PeerGone
from neuron_di.transfer import TransferToken


def test_success():
    token = TransferToken()
    assert not token.is_done()
    token.complete()
    assert token.is_done()
    assert token.error() is None


def test_failure_keeps_its_reason():
    token, error = TransferToken(), PeerGone("gone")
    token.complete(error)
    assert token.is_done()
    assert token.error() is error


def test_each_callback_is_called_once_in_order_whenever_it_came():
    token, calls = TransferToken(), []
    token.on_done(lambda done: calls.append(("early", done)))
    token.on_done(lambda done: calls.append(("second", done)))
    assert calls == []
    token.complete()
    token.on_done(lambda done: calls.append(("late", done)))
    assert calls == [("early", token), ("second", token), ("late", token)]


def test_a_callback_sees_the_outcome_and_may_add_another():
    token, seen = TransferToken(), []
    token.on_done(lambda done: done.on_done(lambda again: seen.append(again.is_done())))
    token.complete()
    assert seen == [True]


@pytest.mark.skipif(not __debug__, reason="stated by an assert: our own bug only")
def test_a_transfer_ends_once():
    token = TransferToken()
    token.complete()
    with pytest.raises(AssertionError, match="ends once"):
        token.complete()


def test_no_callback_is_lost_while_another_thread_completes():
    for _ in range(200):
        token, calls, start = TransferToken(), [], threading.Barrier(2)

        def complete(token=token, start=start):
            start.wait()
            token.complete()

        thread = threading.Thread(target=complete)
        thread.start()
        start.wait()
        token.on_done(calls.append)
        thread.join()
        assert calls == [token]


def test_one_that_fails_keeps_nobody_from_being_told() -> None:
    token, told = TransferToken(), []

    def fail(_: TransferToken) -> None:
        told.append("first")
        raise ValueError("a bug of a callback")

    token.on_done(fail)
    token.on_done(lambda _: told.append("second"))
    with pytest.raises(ValueError, match="a bug"):
        token.complete()
    assert told == ["first", "second"]
