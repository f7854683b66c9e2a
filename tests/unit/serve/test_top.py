"""`neuron-di top`: what a frame says, and that it goes on when the proxy does not."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios

import pytest
from hand_clock import HandClock
from msgspec import structs
from proxy_double import ProxyDouble, metrics, report, worker
from rich.console import Console

from neuron_di.cli import main
from neuron_di.clock import Deadline, use_clock
from neuron_di.errors import ConfigError, PeerGone, RemoteProtocolError, Unauthorized
from neuron_di.status import show_status
from neuron_di.top import View, show_top
from neuron_di.top_figures import quantile, rate
from neuron_di.wire import LaneStatus
from neuron_di_proxy.histogram import Histogram

HOME = "\x1b[H"  # how a frame begins
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SIZES = ("COLUMNS", "LINES")


@pytest.fixture
def clock():
    clock = HandClock()
    with use_clock(clock):
        yield clock


@pytest.fixture
def proxy():
    with ProxyDouble() as proxy:
        yield proxy


def lines_of(view, width=80):
    console = Console(width=width, height=40, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(view)
    return [line.rstrip() for line in console.export_text().splitlines()]


def lane_by(engine):
    return LaneStatus(peer="prefill-0", engine=engine, reason="chosen", connect_s=0.1)


def busy(num_bytes):
    return report(
        worker("prefill", 0, num_running=1, num_transferring=2, num_blocks_free=63),
        worker("prefill", 1, health="frozen"),
        worker(
            "decode",
            0,
            num_running=12,
            num_waiting=3,
            num_blocks_free=0,
            num_blocks_cached=25,
            kv_bytes_received=num_bytes,
        ),
    )


def test_a_frame_shows_load_times_and_each_worker(proxy, clock):
    first_token, gap = Histogram((0.01, 0.1)), Histogram((0.01, 0.02))
    first_token.observe(0.005)  # long ago
    view = View(proxy.url, None)
    proxy.status = busy(1_000_000)
    proxy.metrics = metrics(first_token=first_token, gap=gap, num_answer_tokens=1000)
    view.look()
    for _ in range(100):
        first_token.observe(0.05)
        gap.observe(0.015)
    proxy.status = busy(9_000_000)
    proxy.metrics = metrics(first_token=first_token, gap=gap, num_answer_tokens=3000)
    clock.now_s += 2
    view.look()
    lines = lines_of(view)
    assert lines == [
        f"proxy {proxy.url} serving",
        "3 running, 2 waiting                  1,000 tokens/s out, 0 in",
        "first token p50 55 ms, p99 99.1 ms    between tokens p50 15 ms, p99 19.9 ms",
        "",
        "worker     role     state   run  wait  moving  KV in use        KV in/s",
        "prefill-0  prefill  ready     1     0       2  [|||       37%]",
        "prefill-1  prefill  frozen    0     0       0  [           0%]",
        "decode-0   decode   ready    12     3       0  [||||||    75%]     4 MB",
        "",
        "prefill-1 gets no requests: frozen",
    ]
    assert all(len(line) <= 80 for line in lines)
    assert lines_of(view, width=44) == [
        f"proxy {proxy.url} serving",
        "3 running, 2 waiting",
        "1,000 tokens/s out, 0 in",
        "first token p50 55 ms, p99 99.1 ms",
        "between tokens p50 15 ms, p99 19.9 ms",
        "",
        "worker     state   run  wait   KV",
        "prefill-0  ready     1     0  37%",
        "prefill-1  frozen    0     0   0%",
        "decode-0   ready    12     3  75%",
        "",
        "prefill-1 gets no requests: frozen",
    ]


MORE = ["peers", "age", "lanes", "slots", "model", "layout"]


@pytest.mark.parametrize(("width", "more"), [(80, 0), (100, 2), (120, 3), (150, 6), (200, 6)])
def test_a_wide_terminal_shows_what_each_worker_is(proxy, clock, width, more):
    lanes = [lane_by(engine) for engine in ("tcp", "shm", "shm")]
    said = worker("decode", 0, num_running=12, num_blocks_free=25, lanes=lanes)
    record = structs.replace(
        said.record,
        worker_id="decode-with-a-rather-long-name-in-rack-17",
        model="someone/A-Model-70B",
        layout_digest="1f0c93aa77b1c2d3",
        slots=16,
        connections=["prefill-0", "prefill-1"],
    )
    status = structs.replace(said.status, record=record)
    proxy.status = report(structs.replace(said, record=record, status=status, age_s=200_000))
    view = View(proxy.url, None)
    view.look()
    heading, row = lines_of(view, width)[4:6]
    assert re.split("  +", heading)[8:] == MORE[:more]
    shown = ["2", "2d", "shm 2, tcp 1", "16", "A-Model-70B", "1f0c93aa…"]
    assert re.split("  +", row.partition("0 B")[2])[1:] == shown[:more]
    name = "decode-w…n-rack-17" if more else "decode-…-rack-17"
    assert row.startswith(f"{name}  decode  ready   12 ")
    assert max(len(heading), len(row)) <= width


def test_names_as_serve_makes_them_under_etcd_are_told_apart_on_any_terminal(proxy):
    workers = [worker("prefill", 0), worker("prefill", 1)]
    for number, each in enumerate(workers):
        name = f"prefill-{number}-1499d5"
        record = structs.replace(each.record, worker_id=name, state="draining")
        status = structs.replace(each.status, record=record)
        workers[number] = structs.replace(each, record=record, status=status)
    proxy.status = report(*workers)
    view = View(proxy.url, None)
    view.look()
    for width in (60, 80, 97, 98, 200):
        rows = [line for line in lines_of(view, width) if line.startswith("prefill-")]
        assert [row.split()[0] for row in rows] == ["prefill-0-1499d5", "prefill-1-1499d5"]
        assert "…" not in "".join(lines_of(view, width))


def test_more_lanes_than_there_is_room_for_are_cut(proxy):
    lanes = [lane_by(engine) for engine in ("handover",) * 12 + ("shm\x1b", "tcp")]
    proxy.status = report(worker("prefill", 0), worker("decode", 0, lanes=lanes))
    view = View(proxy.url, None)
    view.look()
    heading, prefill, decode = lines_of(view, 120)[4:7]
    assert decode.endswith("  handover 12, shm?…")
    assert len(heading) == decode.index("handover") + len("lanes")
    assert prefill.endswith("0")


@pytest.mark.parametrize("num_workers", [0, 60])
def test_a_registry_in_trouble_is_said_where_it_is_seen(proxy, clock, num_workers):
    """Above the workers: there may be more of them than lines, or none."""
    trouble = "who is known may be old: the registry does not answer"
    workers = [worker("decode", number) for number in range(num_workers)]
    proxy.status = structs.replace(report(*workers), remarks=[trouble])
    proxy.status = structs.replace(proxy.status, ignored={"key": 3})
    view = View(proxy.url, None)
    view.look()
    lines = lines_of(view)
    assert lines[1] == trouble
    assert lines.count(trouble) == 1
    assert lines[-1] == "3 keys of the registry were left out since the start: key 3"


def test_rates_are_of_the_last_seconds_only(proxy, clock):
    empty = Histogram((1,))
    view = View(proxy.url, None)
    for number in range(40):
        tokens = 100 * min(number, 20)  # then nothing comes any more
        proxy.metrics = metrics(first_token=empty, gap=empty, num_answer_tokens=tokens)
        view.look()
        clock.now_s += 1
        assert len(view._looks) <= 12
    assert " 0 tokens/s out" in lines_of(view)[1]
    assert lines_of(view)[2].split() == ["first", "token", "-", "between", "tokens", "-"]


def test_no_workers_yet(proxy):
    view = View(proxy.url, None)
    view.look()
    assert lines_of(view)[-1] == "no worker is known"


def test_a_proxy_that_goes_and_comes_back(proxy):
    view = View(proxy.url, None)
    proxy.status = report(worker("decode", 0))
    view.look()
    proxy.stop()
    view.look_if_there()
    lines = lines_of(view)
    assert lines[0].startswith(f"no proxy answers at {proxy.url}: Connection refused")
    assert lines[1] == "as it was last:"
    assert lines[-1].startswith("decode-0 ")
    proxy.status = report()
    proxy.start()
    view.look_if_there()
    assert lines_of(view)[-1] == "no worker is known"


def test_what_a_worker_says_cannot_command_the_terminal(proxy):
    said = worker("decode", 0, health="down")
    proxy.status = report(structs.replace(said, health_reason="\x1b]0;x\x1b[2J\x07"))
    view = View(proxy.url, None)
    view.look()
    text = "".join(lines_of(view))
    assert "decode-0 gets no requests: ?]0;x?[2J?" in text
    assert "\x1b" not in text


def test_the_key_is_given_and_a_wrong_one_ends_it(proxy, clock, capsys, monkeypatch):
    proxy.key = "ndi-right"
    monkeypatch.setenv("COLUMNS", "80")
    assert show_top(proxy.url, key="ndi-right", once=True) == 0
    assert "no worker is known" in capsys.readouterr().out
    assert show_status(proxy.url, key="ndi-right", as_json=False) == 0
    for key, words in ((None, "give --key"), ("ndi-wrong", "does not accept")):
        with pytest.raises(Unauthorized, match=words):
            show_top(proxy.url, key=key, once=True)
        with pytest.raises(Unauthorized, match=words):
            show_status(proxy.url, key=key, as_json=False)
        with pytest.raises(Unauthorized):
            View(proxy.url, key).look_if_there()


def test_the_command_takes_the_key_from_its_variable(proxy, clock, capsys, monkeypatch):
    proxy.key = "ndi-right"
    monkeypatch.setenv("KEY_NEURON_DI", "ndi-right")
    for command in ("status", "top --once"):
        assert main([*command.split(), "--url", proxy.url]) == 0
    monkeypatch.setenv("KEY_NEURON_DI", "ndi-wrong")
    assert main(["status", "--url", proxy.url]) == 1
    assert "ndi-" not in capsys.readouterr().err


def test_who_is_no_proxy_is_told_at_once(proxy, clock):
    proxy.metrics = "<html>"
    with pytest.raises(RemoteProtocolError, match="is not a neuron-di proxy"):
        show_top(proxy.url, once=True)
    with pytest.raises(RemoteProtocolError):
        View(proxy.url, None).look_if_there()
    proxy.stop()
    with pytest.raises(PeerGone, match="no proxy answers"):
        show_top(proxy.url, once=True)


def test_without_a_terminal_there_is_only_once(proxy, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115
    with sys.stdout, pytest.raises(ConfigError, match="--once"):
        show_top(proxy.url)


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_cannot_be_drawn_on_is_none(proxy, monkeypatch, kind):
    monkeypatch.setenv("TERM", kind)
    leader, follower = os.openpty()
    with open(leader), open(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(ConfigError, match="--once"):
            show_top(proxy.url)


def test_quantiles_lie_within_their_bucket():
    histogram = Histogram((1, 2, 4))
    assert quantile({}, {}, 0.5) is None
    for value in (0.5, 1.5, 1.5, 3):
        histogram.observe(value)
    counts = {float(end): count for end, count in histogram.buckets()}
    assert quantile({}, counts, 0.25) == 1
    assert quantile({}, counts, 0.5) == 1.5
    assert quantile({}, counts, 1) == 4
    assert quantile(counts, counts, 0.5) is None
    histogram.observe(100)
    later = {float(end): count for end, count in histogram.buckets()}
    assert quantile(counts, later, 0.5) == 4  # all that is known of it
    assert quantile(later, counts, 0.25) == 1  # it began anew
    assert (rate(5, 15, 2), rate(15, 5, 1), rate(0, 1, 0)) == (5, 5, 0)


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, url, columns):
        self.master, slave = pty.openpty()
        self.size(columns)
        # With these the size would be what they say.
        unset = {name: value for name, value in os.environ.items() if name not in SIZES}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "neuron_di", "top", "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=unset | {"TERM": "xterm-256color"},
        )
        os.close(slave)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._written = ""

    def size(self, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def frame_where(self, is_right):
        """The next frame that is as wanted: its lines, as wide as they were written."""
        deadline = Deadline.after(30)
        while True:
            *frames, self._written = self._written.split(HOME)
            for frame in frames:
                lines = STYLE.sub("", frame).splitlines()
                if is_right(lines):
                    return lines
            assert not deadline.has_passed(), frames[-1:]
            if select.select([self.master], [], [], 0.2)[0]:
                self._written += self._decode(os.read(self.master, 65536))

    def end(self):
        self.process.send_signal(signal.SIGINT)
        while self.process.poll() is None:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    os.read(self.master, 65536)
                except OSError:
                    break  # the other end is closed
        code = self.process.wait(timeout=30)
        os.close(self.master)
        return code


def test_it_lives_on_a_terminal_that_changes_and_without_its_proxy(proxy):
    proxy.status = report(worker("decode", 0))
    terminal = Terminal(proxy.url, 80)
    try:
        wide = terminal.frame_where(lambda lines: any("decode-0" in line for line in lines))
        assert max(map(len, wide)) == 80
        terminal.size(50)
        terminal.frame_where(
            lambda lines: {len(line) for line in lines} == {50} and "decode-0" in "".join(lines)
        )
        proxy.stop()
        terminal.frame_where(lambda lines: any("as it was last" in line for line in lines))
        proxy.status = report(worker("prefill", 7))
        proxy.start()
        terminal.frame_where(lambda lines: any("prefill" in line for line in lines))
    finally:
        code = terminal.end()
    assert code == 0
