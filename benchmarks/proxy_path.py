"""What a request costs inside the proxy process, without sockets and other processes.

A real connection, service and leg links, on an event loop whose transports go nowhere. What the
client and the workers would do is done here, off the clock:

    client     every stream asks for a completion, all at once
    prefill    token 0, Parked, later Released, for all streams in one frame each
    decode     the next token of every stream in one frame, again and again, then Finished

Printed are microseconds of this thread's CPU time per request, least and median of the rounds, and
what follows from answers of different lengths: the cost of a request, and that of a token. The one
system call in it writes to a client, here a cheap one: `make bench-proxy` has them all. `--profile`
shows the functions instead.
"""

import argparse
import asyncio
import contextlib
import cProfile
import pstats
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import uvloop

from benchmarks.proxy_load import Load
from benchmarks.proxy_stub import finished, receipt, status
from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di.obs import setup_logging
from neuron_di.wire import Parked, Released, WorkerRecord
from neuron_di.wire.leg_link import (
    FROM_PROXY_BYTES_MAX,
    MAGIC,
    FrameReader,
    OpenLeg,
    Told,
    encode_frame,
    from_proxy_decoder,
)
from neuron_di.wire.legs import LegEvent
from neuron_di_proxy.front import STARTS_PER_TURN
from neuron_di_proxy.front_connection import FrontConnection
from neuron_di_proxy.process import settle_garbage
from neuron_di_proxy.service import Service

ROOM = 8192
REPLIES = (1, 8, 72)
TEXT = "~0000000000000000000~"


class _WorkerSocket:
    def setsockopt(self, *_: int) -> None: ...


class _WorkerTransport(asyncio.Transport):
    """Keeps what is written until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.write = self.written.append

    def writelines(self, pieces: Any) -> None:
        self.written.extend(pieces)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _WorkerSocket() if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def take(self) -> bytes:
        taken = b"".join(self.written)
        self.written.clear()
        return taken

    def abort(self) -> None: ...


class _ClientTransport(_WorkerTransport):
    """One with a real socket, whose packets are what was written at once."""

    def __init__(self) -> None:
        super().__init__()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.num_writes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._ours if name == "socket" else default

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def take(self) -> bytes:
        self._theirs.setblocking(False)
        assert not self.written, "the socket takes all"
        packets = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packets.append(self._theirs.recv(1 << 16))
        self.num_writes = len(packets)
        return b"".join(packets)


class NowhereLoop(uvloop.Loop):
    """Connects to nobody. `links` by port."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[int, Link] = {}

    async def create_connection(self, make: Any, _: Any = None, port: Any = 0, **__: Any) -> Any:
        self.links[port] = Link(make())
        return None


class Link:
    """The far end of a leg link."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._transport = _WorkerTransport()
        self._frames = FrameReader(FROM_PROXY_BYTES_MAX)
        protocol.connection_made(self._transport)
        hello = self._transport.written.pop(0)
        assert hello == MAGIC, "a link begins otherwise"

    def opened(self) -> list[OpenLeg]:
        """The legs that came since it was last asked."""
        payloads = self._frames.feed(self._transport.take())
        messages = [from_proxy_decoder.decode(payload) for payload in payloads]
        return [message for message in messages if isinstance(message, OpenLeg)]

    def frame(self, said: Told) -> Callable[[], None]:
        """What gives the proxy this, as bytes that have just come."""
        data = bytes(encode_frame(said))
        return lambda: self._protocol.data_received(data)


class Owner:
    """Who would accept connections."""

    send_timeout_s = 30.0
    takes_hot = True
    is_draining = False

    def __init__(self, service: Service) -> None:
        self.service = service
        self.options = service.config.front

    def joined(self, _: FrontConnection) -> bool:
        return True

    def left(self, _: FrontConnection) -> None: ...

    def begins(self, connection: FrontConnection) -> None:
        """Nobody counts."""

    def rests(self, connection: FrontConnection) -> None:
        """Nobody needs room."""

    def let_answer(self, connection: FrontConnection) -> None:
        connection.begin_answer()

    def hand_over(self, *_: Any) -> None:
        raise AssertionError("these connections are HTTP/1.1")

    def open_other(self, *_: Any) -> Any:
        raise AssertionError("these requests are answered by the front")


class Directory:
    """One prefill and one decode worker."""

    def __init__(self) -> None:
        self._records = (status("prefill", 1).record, status("decode", 2).record)

    def workers(self) -> tuple[WorkerRecord, ...]:
        return self._records


class Path:
    """A proxy process with so many clients."""

    def __init__(self, num_streams: int) -> None:
        limits = LimitOptions(requests_max=ROOM, queue_max=ROOM)
        owner = Owner(Service(ProxyOptions(limits=limits), Directory()))
        self._loop = cast("NowhereLoop", asyncio.get_running_loop())
        self._clients: list[tuple[FrontConnection, _ClientTransport]] = []
        for _ in range(num_streams):
            connection, transport = FrontConnection(owner), _ClientTransport()
            connection.connection_made(transport)
            self._clients.append((connection, transport))
        self.num_writes = 0  # of all clients, in the last round
        self._crowd_turns = -(-num_streams // STARTS_PER_TURN)  # and as many end in a turn
        self._on_s = 0.0

    def close(self) -> None:
        for _, transport in self._clients:
            transport.close()

    async def round(self, request: bytes, reply_tokens: int) -> float:
        """Answer one request of each client. Seconds of CPU time for each of them."""
        self._on_s = 0.0
        await self._on_clock(lambda: self._ask(request), turns=3 + self._crowd_turns)
        prefill, decode = self._loop.links[1], self._loop.links[2]
        first, second = prefill.opened(), decode.opened()
        assert len(first) == len(second) == len(self._clients), "a leg is missing"
        numbers = [leg.number for leg in first]
        tokens = [(number, 0, 0, TEXT) for number in numbers]
        says: list[tuple[int, LegEvent]] = [(number, Parked(num_prompt=1)) for number in numbers]
        if reply_tokens == 1:
            says = [(number, finished(1)) for number in numbers]
        await self._on_clock(prefill.frame(Told(tokens, says)), turns=1)
        if reply_tokens > 1:
            release = Released(receipt=receipt("prefill"))
            says = [(number, release) for number in numbers]
            await self._on_clock(prefill.frame(Told([], says)), turns=1)
        for index in range(1, reply_tokens):
            numbers = [leg.number for leg in second]
            tokens = [(number, index, index, TEXT) for number in numbers]
            is_last = index == reply_tokens - 1
            says = [(number, finished(reply_tokens)) for number in numbers if is_last]
            await self._on_clock(decode.frame(Told(tokens, says)), turns=1)
        await self._on_clock(lambda: None, turns=2 + self._crowd_turns)
        prefill.opened()  # what was closed
        decode.opened()
        self.num_writes = 0
        for _, transport in self._clients:
            answer = transport.take()
            self.num_writes += transport.num_writes
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "an answer is not whole"
            assert answer.count(TEXT.encode()) == reply_tokens, "a token is missing"
        return self._on_s / len(self._clients)

    def _ask(self, request: bytes) -> None:
        for connection, _ in self._clients:
            connection.data_received(request)

    async def _on_clock(self, act: Callable[[], object], *, turns: int) -> None:
        """Do it, and let the loop go round so often."""
        begun_s = time.thread_time()
        act()
        for _ in range(turns):
            await asyncio.sleep(0)
        self._on_s += time.thread_time() - begun_s


async def _measure(num_streams: int, num_rounds: int, prompt_tokens: int) -> None:
    path = Path(num_streams)
    requests = {tokens: Load(80, 1, 1, tokens, prompt_tokens, 1.0).request() for tokens in REPLIES}
    taken_us: dict[int, list[float]] = {tokens: [] for tokens in REPLIES}
    for tokens, request in requests.items():
        await path.round(request, tokens)
    settle_garbage()
    for _ in range(num_rounds):
        for tokens, request in requests.items():
            taken_us[tokens].append(1e6 * await path.round(request, tokens))
    print(f"{num_streams} streams, {num_rounds} rounds, prompts of {prompt_tokens} tokens")
    print("tokens   least us   median us   writes to the client")
    for tokens, request in requests.items():
        await path.round(request, tokens)
        least, median = min(taken_us[tokens]), statistics.median(taken_us[tokens])
        print(f"{tokens:6}{least:11.1f}{median:12.1f}{path.num_writes / num_streams:10.1f}")
    for words, pick in (("least", min), ("median", statistics.median)):
        some, many = (pick(taken_us[tokens]) for tokens in REPLIES[1:])
        token = (many - some) / (REPLIES[2] - REPLIES[1])
        request_us = some - token * REPLIES[1]
        print(f"{words}: a request {request_us:.1f} us, a token {token:.2f} us")


async def _profile(num_streams: int, num_rounds: int, prompt_tokens: int, order: str) -> None:
    path = Path(num_streams)
    request = Load(80, 1, 1, REPLIES[1], prompt_tokens, 1.0).request()
    await path.round(request, REPLIES[1])
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_rounds):
        await path.round(request, REPLIES[1])
    profile.disable()
    pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(70)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a request inside the proxy process")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--profile", choices=("tottime", "cumtime"))
    wanted = parser.parse_args()
    setup_logging("proxy", "warning")
    sizes = (wanted.streams, wanted.rounds, wanted.prompt_tokens)
    running = _profile(*sizes, wanted.profile) if wanted.profile else _measure(*sizes)
    with asyncio.Runner(loop_factory=NowhereLoop) as runner:
        runner.run(running)


if __name__ == "__main__":
    main()
