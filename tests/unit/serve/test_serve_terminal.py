"""What `serve` says goes to a terminal, a file or a pipe, and none of them can end it."""

import fcntl
import io
import logging
import os
from types import SimpleNamespace

import pytest

from neuron_di import serve_terminal
from neuron_di.serve_terminal import Terminal


def test_a_pipe_that_nobody_reads_ends_nothing():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        terminal = Terminal(file)
        serve_terminal._say(terminal, "said")
        assert os.read(reading, 100) == b"said\n"
        os.close(reading)
        for _ in range(3):
            serve_terminal._say(terminal, "worker decode-0 ended; starting it again")
        # What the file itself still holds cannot be written at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


@pytest.mark.parametrize("style", ["", "red"])
def test_a_pipe_that_is_full_is_not_waited_for(style):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, os.fdopen(reading, "rb"):
        terminal = Terminal(file)
        room = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        for _ in range(room // 1000 + 2):
            serve_terminal._say(terminal, "x" * 1000, style)
        os.read(reading, room)
        serve_terminal._say(terminal, "decode-0 is back", style)
        assert os.read(reading, room).strip() == b"decode-0 is back"


@pytest.mark.parametrize("name", ["tiny", "tiny[/b]", "tiny[v2]"])
def test_a_models_name_is_said_as_it_is(name):
    file = io.StringIO()
    fleet = SimpleNamespace(model_name=name, url="http://[::1]:8000", pids=lambda: {"p": 1})
    serve_terminal._say_ready(Terminal(file), fleet)
    assert file.getvalue().startswith(f"serving {name} at http://[::1]:8000/v1\n  p (pid 1)\n")


def test_what_is_said_beside_a_log_of_json_is_in_it(caplog):
    caplog.set_level(logging.INFO)
    fleet = SimpleNamespace(model_name="tiny", url="http://[::1]:8000", pids=lambda: {"p": 1})
    serve_terminal._say_ready(serve_terminal._terminal("json"), fleet)
    assert [each.event_fields for each in caplog.records] == [
        {"event": "said", "words": "serving tiny at http://[::1]:8000/v1"},
        {"event": "said", "words": "p (pid 1)"},
        {
            "event": "said",
            "words": "neuron-di status --url http://[::1]:8000      Ctrl-C drains and stops",
        },
    ]


@pytest.mark.parametrize("style", ["", "red"])
def test_a_full_disk_ends_nothing(style):
    with open("/dev/full", "w") as file:
        terminal = Terminal(file)
        for _ in range(3):
            serve_terminal._say(terminal, "x" * 10_000, style)
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
