"""A child process is heard, started again, and never left behind."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from neuron_di.child import (
    BACKOFF_S_MAX,
    LONG_LIFE_S,
    STARTS_REFUSED_MAX,
    Backoff,
    Child,
    end,
    run_together,
)
from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, PeerGone, PeerTimeout
from neuron_di.obs import LaunchReport

READY = """print('{"event": "ready", "url": "here"}', flush=True)"""
FAILED = """print('{"event": "failed", "message": "no such model"}', flush=True)"""
WAIT = "import signal; signal.pause()"
KILLED = "import os; os.kill(os.getpid(), 9)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
DEADLINE_S = 30.0


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


@asynccontextmanager
async def child_of(command: Callable[[], Sequence[str]]) -> AsyncIterator[Child]:
    child = Child("prefill-0", command, backoff=Backoff(min_s=0.001, max_s=0.001))
    try:
        yield child
    finally:
        child.kill()
        await child.gone()


async def start(child: Child, timeout_s: float = DEADLINE_S) -> tuple[LaunchReport, list[str]]:
    said: list[str] = []
    ready = await child.start(
        Deadline.after(timeout_s), lambda name, report: said.append(f"{name} {report.event}")
    )
    return ready, said


def test_the_wait_doubles_until_a_life_was_long():
    backoff = Backoff()
    waits = [backoff.after(lived_s) for lived_s in (0.0, 59.9, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, BACKOFF_S_MAX, BACKOFF_S_MAX]
    assert [backoff.after(LONG_LIFE_S), backoff.after(0.0)] == [0.2, 0.4]


async def test_a_child_is_heard_until_it_is_ready_and_may_print_on():
    noise = """print('{"event": "loading"}\\nnot a report')"""
    flood = "print('x' * 1_000_000, flush=True)"
    async with child_of(lambda: python(noise, READY, flood)) as child:
        ready, said = await start(child)
        assert (ready.url, child.is_ready) == ("here", True)
        assert said == ["prefill-0 loading", "prefill-0 ready"]
        assert await child.life() == "prefill-0 ended by itself with code 0"
        assert (child.pid, child.is_ready) == (None, False)


@pytest.mark.parametrize(
    ("lines", "timeout_s", "error", "words"),
    [
        ((FAILED, WAIT), DEADLINE_S, ConfigError, "prefill-0: no such model"),
        (("raise SystemExit(3)",), DEADLINE_S, PeerGone, "prefill-0 ended with code 3"),
        ((KILLED,), DEADLINE_S, PeerGone, "prefill-0 was ended by signal 9 before .*memory"),
        ((WAIT,), 0.01, PeerTimeout, "prefill-0 was not ready in time"),
    ],
)
async def test_one_that_does_not_get_ready_is_gone(lines, timeout_s, error, words):
    async with child_of(lambda: python(*lines)) as child:
        with pytest.raises(error, match=words):
            await start(child, timeout_s)
        await asyncio.wait_for(child.gone(), DEADLINE_S)
        assert child.pid is None


async def test_one_that_ends_is_started_again():
    told: list[str] = []
    lives = iter([(READY, "raise SystemExit(7)"), ("raise SystemExit(1)",), (READY, WAIT)])
    async with child_of(lambda: python(*next(lives))) as child:
        await start(child)
        is_back = asyncio.Event()

        def tell(words: str) -> None:
            told.append(words)
            if "is back" in words:
                is_back.set()

        watch = asyncio.create_task(child.keep_up(DEADLINE_S, tell))
        await asyncio.wait_for(is_back.wait(), DEADLINE_S)
        assert told == [
            "prefill-0 ended by itself with code 7; starting it again in 0.001 s",
            "prefill-0 ended with code 1 before it was ready; starting it again in 0.001 s",
            f"prefill-0 is back (pid {child.pid})",
        ]
        is_back.clear()
        lives = iter([(READY, WAIT)])
        child.kill()
        await asyncio.wait_for(is_back.wait(), DEADLINE_S)
        assert told[-2] == "prefill-0 was ended by signal 9; starting it again in 0.001 s"
        watch.cancel()


async def test_a_system_that_starts_nothing_for_a_moment_costs_a_moment(monkeypatch):
    told: list[str] = []
    start_process, num_starts = asyncio.create_subprocess_exec, 0

    async def start_or_not(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal num_starts
        num_starts += 1
        if num_starts in (2, 3):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start_process(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_not)
    first, later = python(READY, "raise SystemExit(7)"), python(READY, WAIT)
    async with child_of(lambda: later if num_starts else first) as child:
        await start(child)
        await _until_back(child, told)
    assert told[1] == (
        "prefill-0 could not be started: Resource temporarily unavailable; "
        "starting it again in 0.001 s"
    )
    assert num_starts == 4


async def test_the_first_start_says_why_the_system_starts_nothing():
    async with child_of(lambda: ["/no/such/program"]) as child:
        with pytest.raises(PeerGone, match="prefill-0 could not be started: No such file"):
            await start(child)


async def test_a_long_line_before_it_is_ready_is_no_report_and_no_failure():
    told: list[str] = []
    flood = "print('x' * 200_000)"
    lives = iter([(flood, READY, "raise SystemExit(7)"), (flood, READY, WAIT)])
    async with child_of(lambda: python(*next(lives))) as child:
        ready, said = await start(child)
        assert (ready.url, said) == ("here", ["prefill-0 ready"])
        await _until_back(child, told)


async def _until_back(child: Child, told: list[str]) -> None:
    """Keep the child up until it was started again; `told` has what was said."""
    is_back = asyncio.Event()

    def tell(words: str) -> None:
        told.append(words)
        if "is back" in words:
            is_back.set()

    watch = asyncio.create_task(child.keep_up(DEADLINE_S, tell))
    back = asyncio.create_task(is_back.wait())
    await asyncio.wait((watch, back), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    assert back.done(), watch
    watch.cancel()


DRAINED = """print('{"event": "drained"}', flush=True)"""


@pytest.mark.parametrize("noise", ["", "print('x' * 100_000)"])
async def test_one_that_was_drained_stays_away(noise):
    told: list[str] = []
    is_told = asyncio.Event()

    def tell(words: str) -> None:
        told.append(words)
        is_told.set()

    async with child_of(lambda: python(READY, noise, DRAINED)) as child:
        await start(child)
        watch = asyncio.create_task(child.keep_up(DEADLINE_S, tell))
        await asyncio.wait_for(is_told.wait(), DEADLINE_S)
        await asyncio.sleep(0.05)  # longer than it would wait to start again
        assert told == ["prefill-0 was drained and has ended; it is not started again"]
        assert (child.pid, watch.done()) == (None, False)
        watch.cancel()


@pytest.mark.parametrize("last", [(DRAINED, "raise SystemExit(1)"), (DRAINED, "print('no')"), ()])
async def test_only_a_drain_that_ended_well_keeps_it_away(last):
    told: list[str] = []
    is_back = asyncio.Event()

    def tell(words: str) -> None:
        told.append(words)
        if "is back" in words:
            is_back.set()

    lives = iter([(READY, *last), (READY, WAIT)])
    async with child_of(lambda: python(*next(lives))) as child:
        await start(child)
        watch = asyncio.create_task(child.keep_up(DEADLINE_S, tell))
        await asyncio.wait_for(is_back.wait(), DEADLINE_S)
        assert "starting it again" in told[0]
        watch.cancel()


async def test_every_report_of_every_life_is_heard():
    """Also those that come when it has long been ready, between whatever else it prints."""
    heard: list[tuple[str, str | None]] = []
    is_heard = asyncio.Event()

    def on_said(name: str, report: LaunchReport) -> None:
        heard.append((report.event, report.role))
        if len(heard) == 4:
            is_heard.set()

    again = """print('{"event": "ready", "role": "decode"}', flush=True)"""
    too_long = """print('{"event": "drained", "message": "' + 'x' * 100_000 + '"}')"""
    lives = iter(
        [
            (READY, too_long, again, "print('no report')", DRAINED, "raise SystemExit(1)"),
            (READY, WAIT),
        ]
    )
    command = lambda: python(*next(lives))  # noqa: E731
    child = Child("w", command, on_said=on_said, backoff=Backoff(min_s=0.001, max_s=0.001))
    try:
        await start(child)
        watch = asyncio.create_task(child.keep_up(DEADLINE_S, lambda _: None))
        await asyncio.wait_for(is_heard.wait(), DEADLINE_S)
        assert heard == [
            ("ready", None), ("ready", "decode"), ("drained", None), ("ready", None),
        ]  # fmt: skip
        watch.cancel()
    finally:
        child.kill()
        await child.gone()


async def test_one_that_refuses_to_start_is_given_up():
    told: list[str] = []
    num_starts = 0

    def command() -> list[str]:
        nonlocal num_starts
        num_starts += 1
        return python(READY) if num_starts in (1, 4) else python(FAILED)

    async with child_of(command) as child:
        await start(child)
        words = await asyncio.wait_for(child.keep_up(DEADLINE_S, told.append), DEADLINE_S)
    assert words == "prefill-0: no such model"
    # Two refusals before the one good start do not count any more.
    assert num_starts == 4 + STARTS_REFUSED_MAX
    assert told.count(f"{words}; starting it again in 0.001 s") == 2 + STARTS_REFUSED_MAX - 1


async def test_one_that_is_never_given_up_comes_back_once_it_may():
    num_starts = 0
    is_back = asyncio.Event()

    def command() -> list[str]:
        nonlocal num_starts
        num_starts += 1
        if num_starts in range(2, 2 + 2 * STARTS_REFUSED_MAX):
            return python(FAILED)
        return python(READY) if num_starts == 1 else python(READY, WAIT)

    def tell(words: str) -> None:
        if " is back " in words:
            is_back.set()

    async with child_of(command) as child:
        await start(child)
        watch = asyncio.create_task(child.keep_up(DEADLINE_S, tell, gives_up=lambda: False))
        await asyncio.wait_for(is_back.wait(), DEADLINE_S)
        watch.cancel()
    assert num_starts == 2 + 2 * STARTS_REFUSED_MAX


async def test_the_end_is_asked_for_and_then_made():
    async with (
        child_of(lambda: python(READY, WAIT)) as polite,
        child_of(lambda: python(DEAF, READY, WAIT, WAIT)) as deaf,
        child_of(lambda: python(READY)) as never_started,
    ):
        await start(polite)
        await start(deaf)
        pids = [polite.pid, deaf.pid]
        await end([polite, never_started], DEADLINE_S)
        assert await polite.life() == "prefill-0 was ended by signal 15"
        await end([deaf], 0.05)
        assert await deaf.life() == "prefill-0 was ended by signal 9"
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


async def test_the_end_of_one_that_just_ended_keeps_its_code(monkeypatch):
    """Who asks whether a process has ended takes its code, and whoever waits for it gets none."""
    polls = []
    async with child_of(lambda: python(READY, WAIT)) as child:
        await start(child)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "poll", polls.append)
            child.terminate()
        assert await child.life() == "prefill-0 was ended by signal 15"
    assert polls == []


async def test_a_start_that_is_cancelled_leaves_nothing():
    async with child_of(lambda: python(WAIT)) as child:
        starting = asyncio.create_task(start(child))
        while child.pid is None:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.001)
        pid = child.pid
        starting.cancel()
        await asyncio.wait({starting})
        await asyncio.wait_for(child.gone(), DEADLINE_S)
        assert not psutil.pid_exists(pid)


async def test_what_needs_a_child_is_given_up_once_that_has_ended():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with child_of(lambda: python(READY, "raise SystemExit(3)")) as child:
        await start(child)
        with pytest.raises(PeerGone, match="prefill-0 ended by itself with code 3"):
            await child.while_it_lives(work())
    assert cancelled.is_set()


async def test_what_needs_a_child_is_done_while_it_lives():
    done = []

    async def work():
        done.append(1)

    async def broken():
        raise ConfigError("no")

    async with child_of(lambda: python(READY, WAIT)) as child:
        await start(child)
        await child.while_it_lives(work())
        with pytest.raises(ConfigError, match="no"):
            await child.while_it_lives(broken())
        assert child.is_ready
    assert done == [1]


async def test_what_needs_a_child_is_cancelled_with_who_waits():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with child_of(lambda: python(READY, WAIT)) as child:
        await start(child)
        waiting = asyncio.create_task(child.while_it_lives(work()))
        await begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()


async def test_of_several_starts_the_first_refusal_is_raised_by_itself():
    has_ended = []

    async def wait():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            has_ended.append(True)

    async def refuse():
        await asyncio.sleep(0)
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model") as raised:
        await run_together([wait(), refuse(), refuse()])
    assert raised.value.__context__ is None
    assert has_ended == [True]
