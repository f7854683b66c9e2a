"""Prefill in a process of its own, which dies or freezes while it sends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import pytest
from tcp_kit import LAYOUT, PREFILL, WAIT_S, TcpPair, runs_of, tcp_pair, wait

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.transfer.tcp_engine import TcpTimes
from neuron_di.wire import TcpRegion

_SENDER = """
import sys, msgspec
from tcp_kit import *
pool = KvPool.create(LAYOUT, 4096, PREFILL)
bytes_of(pool.memory())[:] = 7
engine = TcpEngine(pool, times=PATIENT)
decoder = msgspec.msgpack.Decoder(TcpRegion)
engine.accept(DECODE, decoder.decode(bytes.fromhex(sys.stdin.readline())), LAYOUT)
print(msgspec.msgpack.encode(engine.local_region(DECODE)).hex(), flush=True)
sys.stdin.readline()
engine.post_send(DECODE, Send(tag=1, runs=runs_of([0], [0], [16 << 20])))
sys.stdin.readline()
"""


@pytest.fixture
def sender():
    """A prefill worker's process, which sends 16 MiB under tag 1."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with process:
        yield process
        process.kill()


def say(process: "subprocess.Popen[str]", line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def region_of(process: "subprocess.Popen[str]", pair: TcpPair) -> TcpRegion:
    own = msgspec.msgpack.encode(pair.decode.local_region(PREFILL)).hex()
    say(process, own)
    told = bytes.fromhex(process.stdout.readline())
    return msgspec.msgpack.decode(told, type=TcpRegion)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_freezes_in_mid_transfer(sender, fate):
    """Its bytes pass through a relay that stops them half-way: so it is in mid-transfer."""
    times = TcpTimes(silence_s=0.5)
    options = {"is_connected": False, "transfer_streams": 1}
    with tcp_pair(4096, times=times, **options) as pair, Throttle() as throttle:
        region = region_of(sender, pair)
        port = throttle.start(region.port)
        pair.decode.connect(PREFILL, msgspec.structs.replace(region, port=port), LAYOUT)
        receive = replace(pair.receive_of(runs_of([0], [0], [16 << 20])), tag=1)
        token = pair.receive(receive)
        say(sender, "send")
        assert throttle.is_half_way.wait(WAIT_S)
        assert not token.is_done()
        os.kill(sender.pid, fate)
        if fate == signal.SIGKILL:
            sender.wait(WAIT_S)
        throttle.go_on.set()
        assert isinstance(wait(token), PeerGone | PeerTimeout)
        assert pair.received[0] == 7
        before = pair.received.copy()
        assert isinstance(wait(pair.receive(pair.whole())), PeerGone | PeerTimeout)
        assert (pair.received == before).all()
        if fate == signal.SIGSTOP:
            os.kill(sender.pid, signal.SIGCONT)


class Throttle:
    """Relays one connection to a port, with small buffers. After 4 MiB it waits to be told on."""

    def __init__(self) -> None:
        self.is_half_way, self.go_on = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()

    def start(self, port: int) -> int:
        """Where to connect to instead."""
        self._threads = [threading.Thread(target=self._relay, args=(port,))]
        self._threads[0].start()
        return self._listener.getsockname()[1]

    def _relay(self, port: int) -> None:
        near, _ = self._listener.accept()
        far = socket.socket()
        with near, far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            far.connect(("127.0.0.1", port))
            forth = threading.Thread(target=self._copy, args=(near, far))
            forth.start()
            self._copy(far, near, pause_at=4 << 20)
            forth.join(WAIT_S)

    def _copy(self, source: socket.socket, target: socket.socket, pause_at: int = 0) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
                passed += len(part)
                if pause_at and passed > pause_at:
                    self.is_half_way.set()
                    self.go_on.wait(WAIT_S)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
