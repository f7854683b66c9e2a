"""A worker's process that hangs ends, and says where. Each one here is a process of its own."""

import asyncio
import subprocess
import sys
from itertools import count

import pytest

from neuron_di.obs import hang_watch

SCRIPT = """
import asyncio, threading, time
from neuron_di.clock import now_s
from neuron_di.obs.hang_watch import watching_for_hangs

def hang_for_ever():
    threading.Event().wait()

def hold_the_loop():
    time.sleep(600)

async def main(busy_since_s, act):
    threading.Thread(target=hang_for_ever, daemon=True).start()
    async with watching_for_hangs(busy_since_s, {timeout_s}):
        await asyncio.sleep(0.5)
        act()
        await asyncio.sleep({then_s})
    print("went on")

begun_s = now_s()
asyncio.run(main({busy_since_s}, {act}))
"""


def run(*, timeout_s=1.0, busy_since_s="lambda: None", act="lambda: None", then_s=600):
    """The process, once it has ended."""
    script = SCRIPT.format(timeout_s=timeout_s, busy_since_s=busy_since_s, act=act, then_s=then_s)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_a_step_that_has_no_end_ends_the_process():
    ended = run(busy_since_s="lambda: begun_s")
    assert ended.returncode == 1
    assert "in hang_for_ever" in ended.stderr, "it says where each thread is"
    assert "went on" not in ended.stdout


def test_an_event_loop_that_does_not_turn_ends_the_process():
    ended = run(act="hold_the_loop")
    assert ended.returncode == 1
    assert "in hold_the_loop" in ended.stderr


def test_a_log_that_nobody_reads_does_not_keep_it_alive():
    script = (
        "from neuron_di.obs import get_logger, setup_logging\n"
        "setup_logging('p')\n"
        "for _ in range(3000): get_logger('x').info('event', words='w' * 100)\n"
    ) + SCRIPT.format(timeout_s=1.0, busy_since_s="now_s", act="hold_the_loop", then_s=600)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 1
        process.stderr.close()


@pytest.mark.parametrize("busy_since_s", ["lambda: None", "now_s"])
def test_who_turns_and_steps_goes_on(busy_since_s):
    """For several times as long as one of them may take."""
    ended = run(timeout_s=0.5, busy_since_s=busy_since_s, then_s=2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


def test_nothing_is_watched_where_nobody_wants_it():
    ended = run(timeout_s=None, busy_since_s="lambda: 0.0", then_s=2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


def test_nothing_is_watched_any_more_once_it_is_left():
    script = SCRIPT.format(timeout_s=0.5, busy_since_s="lambda: None", act="lambda: None", then_s=0)
    script += "hang_for = time.sleep(2)\nprint('and on')\n"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "went on\nand on\n")


async def test_time_that_a_step_has_taken_counts(monkeypatch):
    """The end is due when the step has lasted so long, not so long after it was first seen."""
    armed, now = [], count(100.0, 2.0)
    monkeypatch.setattr(hang_watch, "now_s", lambda: next(now))
    monkeypatch.setattr(hang_watch, "INTERVAL_S", 0.0)
    monkeypatch.setattr(
        hang_watch.faulthandler,
        "dump_traceback_later",
        lambda left_s, **_: armed.append(left_s),
    )
    async with hang_watch.watching_for_hangs(lambda: 99.0, 300.0):
        while len(armed) < 3:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0)
    assert armed[:3] == [299.0, 297.0, 295.0]


async def test_it_goes_on_where_it_cannot_watch_for_a_while(monkeypatch, caplog):
    """A container may have no room for another thread just now."""
    armed = []

    def dump_traceback_later(left_s, **_):
        armed.append(left_s)
        if len(armed) < 3:
            raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(hang_watch, "INTERVAL_S", 0.0)
    monkeypatch.setattr(hang_watch.faulthandler, "dump_traceback_later", dump_traceback_later)
    async with hang_watch.watching_for_hangs(lambda: None, 300.0):
        while len(armed) < 5:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0)
    assert [each.message for each in caplog.records] == ["hang_watch_is_off"]
