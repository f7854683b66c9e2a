"""B53: what an exception says may be a prompt, so a log line never repeats it."""

import asyncio
import gc
import logging

import pytest

from neuron_di.errors import LocalProtocolError
from neuron_di.obs import get_logger, setup_logging

CANARY = "".join(["can", "ary", "-prompt"])  # not as one word in any line of this file


@pytest.fixture
def start(capsys):
    """Starts logging at debug. What it returns gives everything logged since."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:])

    def start_logging():
        setup_logging("proxy", "debug")
        return lambda: capsys.readouterr().err

    yield start_logging
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def fail(kind):
    raise kind(CANARY)


@pytest.mark.parametrize("kind", [KeyError, ValueError, OSError, RuntimeError, TypeError])
def test_a_traceback_has_no_words_of_a_foreign_exception(start, kind):
    lines = start()
    try:
        try:
            fail(kind)
        except kind as error:
            error.add_note(CANARY)
            raise LocalProtocolError("a rule was broken") from error
    except LocalProtocolError:
        get_logger("neuron_di.test").exception("internal_error", request="r1")
    logged = lines()
    assert CANARY not in logged
    assert kind.__name__ in logged
    assert "LocalProtocolError: a rule was broken" in logged
    assert "test_log_canary.py" in logged  # it still says where


def test_an_exception_that_is_over_is_logged_the_same_way(start):
    lines = start()
    try:
        fail(KeyError)
    except KeyError as error:
        caught = error
    get_logger("neuron_di.test").exception("late", raised=caught)
    logged = lines()
    assert "test_log_canary.py" in logged
    assert "KeyError" in logged
    assert CANARY not in logged


def test_causes_are_shown_unless_they_are_hidden_on_purpose(start):
    lines = start()
    for is_hidden in (False, True):
        try:
            try:
                fail(KeyError)
            except KeyError as error:
                error.__suppress_context__ = False
                if is_hidden:
                    raise LocalProtocolError("second") from None
                raise LocalProtocolError("second")  # noqa: B904 - its context is what is shown
        except LocalProtocolError:
            get_logger("neuron_di.test").exception("internal_error")
        logged = lines()
        assert ("KeyError" in logged) is not is_hidden
        assert CANARY not in logged


def test_what_failed_in_a_group_is_shown_without_its_words(start):
    lines = start()
    errors = []
    for kind in (KeyError, ValueError):
        try:
            fail(kind)
        except kind as error:
            errors.append(error)
    group = ExceptionGroup(CANARY, errors * 2)
    get_logger("neuron_di.test").exception("connection_failed", raised=group)
    logged = lines()
    assert (logged.count("KeyError"), logged.count("ValueError")) == (2, 1)  # not more than three
    assert logged.count("in fail") == 3
    assert "ExceptionGroup" in logged
    assert CANARY not in logged


async def test_a_task_that_failed_unseen_does_not_show_its_exception(start):
    lines = start()

    async def work():
        fail(KeyError)

    task = asyncio.create_task(work())
    await asyncio.wait((task,))
    del task
    gc.collect()
    logged = lines()
    assert "Task exception was never retrieved" in logged
    assert "KeyError" in logged
    assert CANARY not in logged
