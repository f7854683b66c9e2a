"""Who makes a copy, and when: the thread, or for a short one whoever posts it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neuron_di.errors import KvChanged, LocalProtocolError
from neuron_di.transfer import TransferToken, copy_thread
from neuron_di.transfer.copy_thread import CopyThread

WAIT_S = 30.0


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    thread = CopyThread("copies")
    yield thread
    thread.end()
    thread.join()


class Copies:
    """Notes which copies were made, where, and how they ended."""

    def __init__(self, thread: CopyThread) -> None:
        self.thread = thread
        self.made: list[tuple[str, bool]] = []  # the name, and whether it was made by the poster
        self.poster = threading.get_ident()

    def post(self, name: str, *, is_short: bool = True) -> TransferToken:
        token = TransferToken()
        self.thread.post(lambda: self._make(name), 8, token, is_short=is_short)
        return token

    def _make(self, name: str) -> None:
        self.made.append((name, threading.get_ident() == self.poster))

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Meanwhile the thread is in a copy."""
        has_begun, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            has_begun.set()
            may_end.wait(WAIT_S)

        token = TransferToken()
        self.thread.post(hold, 1, token)
        assert has_begun.wait(WAIT_S)
        try:
            yield
        finally:
            may_end.set()
        wait_for(token)


def wait_for(token: TransferToken) -> None:
    is_over = threading.Event()
    token.on_done(lambda _: is_over.set())
    assert is_over.wait(WAIT_S)


def test_a_short_copy_is_over_when_it_was_posted(thread: CopyThread) -> None:
    copies = Copies(thread)
    token = copies.post("one")
    assert token.is_done()
    assert token.error() is None
    assert token.kv_bytes == 8
    assert copies.made == [("one", True)]


def test_a_long_copy_is_the_threads(thread: CopyThread) -> None:
    copies = Copies(thread)
    wait_for(copies.post("one", is_short=False))
    assert copies.made == [("one", False)]


def test_a_short_copy_overtakes_none_that_was_posted_before(thread: CopyThread) -> None:
    copies = Copies(thread)
    with copies.held_up():
        tokens = [
            copies.post("long", is_short=False),
            copies.post("short"),
            copies.post("shorter"),
        ]
        assert not any(token.is_done() for token in tokens)
        assert copies.made == []
    for token in tokens:
        wait_for(token)
    assert copies.made == [("long", False), ("short", False), ("shorter", False)]


def test_a_short_copy_is_made_here_again_once_the_thread_has_nothing_to_do(
    thread: CopyThread,
) -> None:
    copies = Copies(thread)
    wait_for(copies.post("long", is_short=False))
    # The token is done a moment before the thread is idle.
    for count in range(100_000):
        wait_for(copies.post(str(count)))
        if copies.made[-1][1]:
            break
    assert copies.made[-1][1]


def test_short_copies_leave_the_poster_three_quarters_of_its_time(
    thread: CopyThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(copy_thread, "now_s", lambda: now[0])
    poster = threading.get_ident()

    def is_made_here(copy_s: float) -> bool:
        made_by: list[int] = []

        def copy() -> None:
            made_by.append(threading.get_ident())
            now[0] += copy_s if made_by == [poster] else 0.0

        token = TransferToken()
        thread.post(copy, 8, token, is_short=True)
        wait_for(token)
        while thread._num_open:  # the token is done a moment before the thread is idle
            pass
        return made_by == [poster]

    assert is_made_here(2.0)
    for _ in range(3):
        assert not is_made_here(2.0)
    now[0] += 5.75
    assert not is_made_here(2.0)
    now[0] += 0.25
    assert is_made_here(0.5)
    now[0] += 1.5
    assert is_made_here(0.5)
    assert not is_made_here(0.5)


def test_a_short_copy_that_fails_ends_its_token_and_nothing_else(thread: CopyThread) -> None:
    def fail() -> None:
        raise ValueError("no such memory")

    token = TransferToken()
    thread.post(fail, 8, token, is_short=True)
    assert isinstance(token.error(), LocalProtocolError)
    assert token.kv_bytes == 0
    token = TransferToken()
    thread.post(lambda: KvChanged("it was given up"), 8, token, is_short=True)
    wait_for(token)
    assert isinstance(token.error(), KvChanged)
    assert token.kv_bytes == 0
    token = Copies(thread).post("next")
    wait_for(token)
    assert token.error() is None


@pytest.mark.parametrize("is_short", [True, False])
def test_a_callback_may_post_again(thread: CopyThread, *, is_short: bool) -> None:
    """On whichever thread it is called."""
    copies = Copies(thread)
    is_over = threading.Event()

    def post_next(count: int) -> None:
        if count == 20:
            is_over.set()
        else:
            token = copies.post(str(count), is_short=is_short)
            token.on_done(lambda _: post_next(count + 1))

    post_next(0)
    assert is_over.wait(WAIT_S)
    assert [name for name, _ in copies.made] == [str(count) for count in range(20)]


def test_a_callback_on_the_thread_posts_behind_what_waits_there(thread: CopyThread) -> None:
    copies = Copies(thread)
    posted: list[TransferToken] = []
    with copies.held_up():
        first = copies.post("first", is_short=False)
        first.on_done(lambda _: posted.append(copies.post("by the callback")))
        last = copies.post("last", is_short=False)
    wait_for(last)
    wait_for(posted[0])
    assert [name for name, _ in copies.made] == ["first", "last", "by the callback"]


def test_a_callback_that_fails_harms_only_who_gave_it(thread: CopyThread) -> None:
    copies = Copies(thread)

    def fail(token: TransferToken) -> None:
        raise ValueError(token)

    with pytest.raises(ValueError, match="TransferToken"):
        copies.post("short").on_done(fail)
    with copies.held_up():
        copies.post("long", is_short=False).on_done(fail)
    wait_for(copies.post("next", is_short=False))
    assert copies.made == [("short", True), ("long", False), ("next", False)]


@pytest.mark.parametrize("is_short", [True, False])
def test_nothing_is_copied_behind_the_end(thread: CopyThread, *, is_short: bool) -> None:
    thread.end()
    copies = Copies(thread)
    token = copies.post("late", is_short=is_short)
    assert isinstance(token.error(), LocalProtocolError)
    thread.join()
    assert copies.made == []


def test_the_end_waits_for_a_short_copy(thread: CopyThread) -> None:
    """Whoever has waited for the end may give the memory back."""
    has_begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        has_begun.set()
        may_end.wait(WAIT_S)
        order.append("copied")

    def end() -> None:
        thread.end()
        thread.join()
        order.append("ended")

    poster = threading.Thread(
        target=thread.post, args=(hold, 1, TransferToken()), kwargs={"is_short": True}
    )
    ender = threading.Thread(target=end)
    poster.start()
    assert has_begun.wait(WAIT_S)
    ender.start()
    assert thread.is_alive()
    may_end.set()
    poster.join(WAIT_S)
    ender.join(WAIT_S)
    assert order == ["copied", "ended"]
