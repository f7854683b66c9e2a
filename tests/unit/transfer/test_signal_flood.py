"""A peer that sends more than is read costs its own link, not the process and not its loop."""

import asyncio
import subprocess
import sys

import zmq
import zmq.asyncio

from neuron_di.registry.link import open_socket
from neuron_di.transfer.signal_link import bind_router, bound_port, connect_dealer
from neuron_di.transfer.signal_socket import MESSAGES_PER_TURN_MAX, SignalSocket

FLOODING = """
import os, time, zmq
from neuron_di.transfer.signal_link import bind_router, bound_port

router = bind_router(zmq.Context(), "127.0.0.1", 0)
print(bound_port(router), flush=True)
identity, _ = router.recv_multipart()
end_s = time.monotonic() + 8
while time.monotonic() < end_s:
    try:
        router.send_multipart([identity, b"p" * 500], zmq.NOBLOCK)
    except zmq.ZMQError:
        time.sleep(0.01)
os._exit(0)
"""
STANDING_STILL = """
import subprocess, sys, time, zmq
from neuron_di.transfer.signal_link import connect_dealer

context = zmq.Context()
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
socket = connect_dealer(context, "127.0.0.1", int(peer.stdout.readline()), b"x.1")
socket.send(b"hi")
time.sleep(5)
num_read = 0
while num_read < 5000 and socket.poll(3000):
    num_read += len(socket.recv_multipart())
print(num_read)
context.destroy(linger=0)
peer.kill()
"""


def test_a_process_that_does_not_read_for_seconds_lives():
    """libzmq aborted it when a heartbeat of its own was due meanwhile."""
    command = [sys.executable, "-c", STANDING_STILL, FLOODING]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert (done.returncode, done.stdout) == (0, "5000\n"), done.stderr


def test_dead_hosts_are_told_by_tcp_on_every_socket():
    context, own = zmq.Context(), zmq.asyncio.Context()
    router = bind_router(context, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{bound_port(router)}"
    dealer = connect_dealer(context, "127.0.0.1", bound_port(router), b"x.1")
    others = [open_socket(own, kind, address) for kind in (zmq.ROUTER, zmq.DEALER)]
    try:
        for socket in (router, dealer, *others):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
            idle_s, pause_s, count = map(
                socket.getsockopt,
                (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT),
            )
            assert idle_s + pause_s * count == 4
            assert socket.getsockopt(zmq.TCP_MAXRT) == 3000
    finally:
        context.destroy(linger=0)
        own.destroy(linger=0)


async def test_messages_that_are_answered_leave_the_loop_its_turns():
    """Each answer looks for further messages: so many looks at once would read all there is."""
    context = zmq.Context()
    router = bind_router(context, "127.0.0.1", 0)
    dealer = connect_dealer(context, "127.0.0.1", bound_port(router), b"x.1")
    num_turns, num_sent = 0, 3000
    turns_of: list[int] = []

    def answer(frames: list[bytes]) -> None:
        turns_of.append(num_turns)
        link.send([frames[0], b"pong"])

    for _ in range(num_sent):
        dealer.send(b"ping")
    assert router.poll(10_000)
    await asyncio.sleep(0.2)  # until they are all there
    link = SignalSocket(router, answer)
    try:
        async with asyncio.timeout(30):
            while len(turns_of) < num_sent:
                await asyncio.sleep(0)
                num_turns += 1
    finally:
        link.close(linger_ms=0)
        context.destroy(linger=0)
    most = max(turns_of.count(turn) for turn in set(turns_of))
    assert most <= 2 * MESSAGES_PER_TURN_MAX  # the descriptor's own look, and a due one
