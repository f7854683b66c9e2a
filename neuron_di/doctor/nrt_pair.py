"""Two processes that send and receive between two NeuronCores of this host. Never imported.

    python -m neuron_di.doctor.nrt_pair {receive|send} ADDRESS LNC PEER_LNC CONNECT_S WATCH_S

This one has the core LNC, tells of its steps and directs a second process on PEER_LNC, which does
the other half. As `receive` it moves bytes and looks at them before and after a flush; then, as
either, it posts requests that nobody will answer, kills its peer, and watches them for WATCH_S.
So far this has run on a simulator of libnrt only.
"""

import os
import sys
from collections.abc import Callable

from neuron_di.clock import Deadline, now_s, sleep_s
from neuron_di.doctor.nrt_end import (
    MEMORY_BYTES,
    End,
    Peer,
    Role,
    connect_both,
    pattern,
    second_process,
    start_end,
    wait_for,
)
from neuron_di.doctor.steps import Facts, take
from neuron_di_bindings.nrt import NrtError, NrtMisuse, NrtRequest

SIZES = (4 << 10, 1 << 20, MEMORY_BYTES)
FLUSH_ROUNDS = 16
FLUSH_BYTES = 64 << 10
NUM_UNANSWERED = 4
_EMPTY = 0xFF
_POLL_S = 0.001


def direct(
    role: Role, address: str, lnc: int, peer_lnc: int, *, connect_s: float, watch_s: float
) -> None:
    """Steps "start" and "connect", with `receive` "bytes" and "flush", then "kill", "leave"."""
    with second_process(peer_lnc, "send" if role == "receive" else "receive") as peer:
        ends: list[End] = []
        if not take("start", lambda: _start(ends, peer, lnc)):
            return
        end = ends[0]
        if not take("connect", lambda: connect_both(end, peer, role, address, peer_lnc, connect_s)):
            return
        if role == "receive":
            take("bytes", lambda: _move(end, peer))
            take("flush", lambda: _look_before_flush(end, peer))
        take("kill", lambda: _outlive(end, peer, role, watch_s))
        take("leave", lambda: _leave(end))


def _start(ends: list[End], peer: Peer, lnc: int) -> None:
    peer.answer()
    ends.append(start_end(lnc))


def _move(end: End, peer: Peer) -> Facts:
    """Bytes of some sizes, compared after a flush. Durations are from the order to the flush."""
    durations_s: dict[str, float] = {}
    for number, num_bytes in enumerate(SIZES):
        end.tensor.fill(_EMPTY)
        request = end.post("receive", 0, num_bytes)
        start_s = now_s()
        peer.tell(do="send", number=number, num_bytes=num_bytes)
        count = wait_for(request)
        end.both.flush(end.lnc)
        durations_s[str(num_bytes)] = round(now_s() - start_s, 6)
        peer.answer()
        if count != num_bytes or _read(end, num_bytes) != pattern(number, num_bytes):
            return {"failed": f"of {num_bytes} bytes other ones arrived"}
    return {"sizes": list(SIZES), "durations_s": durations_s}


def _look_before_flush(end: End, peer: Peer) -> Facts:
    """How often received bytes could be read before the flush, and whether always after it."""
    num_early = num_part = num_late = 0
    for number in range(FLUSH_ROUNDS):
        end.tensor.fill(_EMPTY, 0, FLUSH_BYTES)
        request = end.post("receive", 0, FLUSH_BYTES)
        peer.tell(do="send", number=number, num_bytes=FLUSH_BYTES)
        wait_for(request)
        before = _read(end, FLUSH_BYTES)
        end.both.flush(end.lnc)
        after = _read(end, FLUSH_BYTES)
        peer.answer()
        wanted = pattern(number, FLUSH_BYTES)
        num_early += before == wanted
        num_part += before not in (wanted, bytes([_EMPTY]) * FLUSH_BYTES)
        num_late += after == wanted
    facts: Facts = {
        "rounds": FLUSH_ROUNDS,
        "num_bytes": FLUSH_BYTES,
        "there_before_flush": num_early,
        "partly_there_before_flush": num_part,
        "there_after_flush": num_late,
    }
    if num_late < FLUSH_ROUNDS:
        facts["failed"] = f"after a flush the bytes were there {num_late} times"
    return facts


def _read(end: End, num_bytes: int) -> bytes:
    found = bytearray(num_bytes)
    end.tensor.read(0, found)
    return bytes(found)


def _outlive(end: End, peer: Peer, role: Role, watch_s: float) -> Facts:
    """Post requests, kill the peer, and watch what becomes of them."""
    requests = [
        end.post(role, number * FLUSH_BYTES, FLUSH_BYTES) for number in range(NUM_UNANSWERED)
    ]
    peer.kill()
    outcomes: dict[int, str] = {}
    start_s, deadline = now_s(), Deadline.after(watch_s)
    while len(outcomes) < len(requests) and not deadline.has_passed():
        for number, request in enumerate(requests):
            if number not in outcomes and (outcome := _outcome(request)) is not None:
                outcomes[number] = f"{outcome} after {now_s() - start_s:.2f} s"
        sleep_s(_POLL_S)
    return {
        "posted": len(requests),
        "watched_s": watch_s,
        "outcomes": [outcomes.get(number, "still posted") for number in range(len(requests))],
        "flush": _said(lambda: end.both.flush(end.lnc)),
    }


def _outcome(request: NrtRequest) -> str | None:
    try:
        count = request.test()
    except (NrtError, NrtMisuse) as error:
        return f"failed: {error}"
    return None if count is None else f"over, {count} bytes"


def _leave(end: End) -> Facts:
    """Whether the core can be closed after that. It is not forced: the process ends anyway."""
    return {
        "close": _said(lambda: end.both.close(end.lnc)),
        "runtime": _said(end.runtime.close),
    }


def _said(action: Callable[[], None]) -> str:
    try:
        action()
    except (NrtError, NrtMisuse) as error:
        return f"failed: {error}"
    return "ok"


if __name__ == "__main__":
    its_role, its_address, its_lnc, peers_lnc, connect_within_s, watch_for_s = sys.argv[1:]
    direct(
        "send" if its_role == "send" else "receive",
        its_address,
        int(its_lnc),
        int(peers_lnc),
        connect_s=float(connect_within_s),
        watch_s=float(watch_for_s),
    )
    os._exit(0)  # what is posted for good keeps the library from ending in order
