"""Nobody waits for whoever reads the log."""

import fcntl
import io
import logging
import os
import pty
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest

from neuron_di.obs import get_logger, log_stream, setup_logging
from neuron_di.obs.log_stream import LogStream

LINE = "x" * 100


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def pipe(stack):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 16)
    return opened(stack, reader, writer)


def opened(stack, reader, writer):
    return stack.enter_context(open(reader, "rb", 0)), stack.enter_context(open(writer, "w"))


def sockets(stack):
    ends = socket.socketpair()
    return opened(stack, *(end.detach() for end in ends))


def terminal(stack):
    return opened(stack, *pty.openpty())


def pipe_of_another_user(stack):
    """Which cannot be opened anew."""
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(os, "open", refuse)
    return pipe(stack)


def refuse(*_, **__):
    raise PermissionError


KINDS = [pipe, sockets, terminal, pipe_of_another_user]


def read_some(reader):
    return os.read(reader.fileno(), 1 << 20).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_dropped_where_nobody_reads_and_come_again(stack, kind):
    reader, writer = kind(stack)
    stream = stack.enter_context(closing(LogStream(writer)))
    num_taken = 0
    while stream.write(LINE):
        num_taken += 1
    assert num_taken > 10
    assert not stream.write(LINE)
    text = ""
    while text.count("\n") < num_taken:
        text += read_some(reader)
    assert stream.write("again")
    assert (text + read_some(reader)).splitlines()[-1] == "again"


def test_who_else_has_the_same_file_is_left_as_it_was(stack):
    _, writer = pipe(stack)
    stack.enter_context(closing(LogStream(writer)))
    assert os.get_blocking(writer.fileno())


def test_a_line_that_was_cut_ends_before_the_next(stack):
    reader, writer = pipe(stack)
    stream = stack.enter_context(closing(LogStream(writer)))
    assert not stream.write("y" * (1 << 20))
    cut = ""
    while len(cut) < 1 << 16:
        cut += read_some(reader)
    assert stream.write("next")
    assert read_some(reader) == "\nnext\n"
    assert set(cut) == {"y"}


def test_who_stops_reading_costs_lines_not_the_writer(stack):
    reader, writer = pipe(stack)
    stream = stack.enter_context(closing(LogStream(writer)))
    reader.close()
    assert not stream.write(LINE)


def test_a_file_takes_all(tmp_path):
    with open(tmp_path / "log", "w") as file:
        stream = LogStream(file)
        assert all(stream.write(LINE) for _ in range(2000))
    assert (tmp_path / "log").read_text() == f"{LINE}\n" * 2000


def test_what_has_no_descriptor_is_written_to_as_it_is():
    file = io.StringIO()
    assert LogStream(file).write("héé")
    assert file.getvalue() == "héé\n"


def test_what_was_dropped_is_told(stack, monkeypatch):
    reader, writer = pipe(stack)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", writer)
    try:
        setup_logging("decode-0")
        log = get_logger("test")
        for _ in range(2000):
            log.info("something", words=LINE)
        text = read_some(reader)
        log.info("later")
        *_, told, later = (text + read_some(reader)).splitlines()
    finally:
        root.handlers[0].close()
        root.handlers[:] = handlers
        root.setLevel(level)
    assert "level=warning process=decode-0 event=log_lines_dropped num_lines=" in told
    nums = [
        int(num) for num in re.findall(r"event=log_lines_dropped num_lines=(\d+)", f"{text}{told}")
    ]
    assert sum(nums) + text.count("event=something") == 2000
    assert later.endswith("event=later")


def test_a_process_whose_log_nobody_reads_goes_on():
    script = (
        "from neuron_di.obs import get_logger, setup_logging\n"
        "setup_logging('p')\n"
        "for _ in range(5000): get_logger('x').info('event', words='w' * 100)\n"
        "print('on')\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        process.stderr.close()
    assert process.returncode == 0


def test_bytes_that_may_wait_are_written_in_pieces_that_do_not(monkeypatch, stack):
    """A pipe that has room for some bytes says that it is ready, and would wait for the rest."""
    reader, writer = pipe_of_another_user(stack)
    assert not LogStream(writer).write("y" * (1 << 20))
    assert len(read_some(reader)) == log_stream._WHOLE_BYTES
