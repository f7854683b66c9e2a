"""Two processes pass blocks to and fro, and are killed again and again: no block is lost."""

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from arena_kit import LAYOUT

from neuron_di.clock import Deadline
from neuron_di.kv import ArenaPool, create_arena
from neuron_di.types import Incarnation, WorkerId

HAMMER = Path(__file__).with_name("hammer.py")
NUM_BLOCKS = 40
NUM_LIVES = 12
# How long both run before one of them is killed: until words have changed so often.
CHANGES = 6_000


def start(role: str, arena_fd: int, link: socket.socket, seed: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, str(HAMMER), role, str(arena_fd), str(link.fileno()), str(seed)],
        pass_fds=(arena_fd, link.fileno()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b".", process.communicate()
    return process


def generations(arena) -> int:
    """How often any block has changed hands or been given up."""
    return int((arena.raw_words[: arena.num_granted] & 0xFFFF_FFFF_FFFF).sum())


@pytest.mark.timeout(120)
def test_no_block_is_lost_whoever_is_killed_whenever() -> None:
    arena_fd = create_arena()
    ours = ArenaPool.join(arena_fd, WorkerId("watcher"), LAYOUT, 1, Incarnation("00" * 16))
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # few promises wait: most still hold
    links = {"prefill": sending, "decode": receiving}
    chance = random.Random(5)
    processes = {role: start(role, arena_fd, link, 1) for role, link in links.items()}
    try:
        for life in range(NUM_LIVES):
            wanted, deadline = generations(ours.arena) + CHANGES, Deadline.after(30.0)
            while generations(ours.arena) < wanted + chance.randint(0, CHANGES):
                assert not deadline.has_passed()
                for process in processes.values():
                    assert process.poll() is None, process.communicate()
            killed = chance.choice([("prefill",), ("decode",), ("prefill", "decode")])
            for role in killed:
                processes[role].send_signal(signal.SIGKILL)
                processes[role].communicate()
            for role in killed:
                processes[role] = start(role, arena_fd, links[role], life)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
        sending.close()
        receiving.close()
    ends = [
        ArenaPool.join(arena_fd, WorkerId(role), LAYOUT, NUM_BLOCKS, Incarnation("11" * 16))
        for role in links
    ]
    assert [end.num_blocks for end in ends] == [NUM_BLOCKS, NUM_BLOCKS]
    assert ours.arena.num_granted == 1 + 2 * NUM_BLOCKS
    assert set(ends[0].block_ids()) != set(range(1, 1 + NUM_BLOCKS)), "none was exchanged"
    everything = [block_id for end in (*ends, ours) for block_id in end.block_ids()]
    assert sorted(everything) == list(range(1 + 2 * NUM_BLOCKS))
    for end in (*ends, ours):
        end.close()
    os.close(arena_fd)
