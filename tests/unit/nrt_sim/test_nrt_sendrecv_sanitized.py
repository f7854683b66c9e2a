"""Async send/receive of the simulator of libnrt under the sanitizers: memory, and threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nrt_sendrecv_peer import FAILURE, SUCCESS, Peers, all_ended
from nrt_sim import build
from test_nrt_sendrecv_exchange import move_by_threads, run_exchange

FOUND = 99  # exit code of a process in which a sanitizer found something


def thread_sanitizer():
    """The library under the thread sanitizer and what LD_PRELOAD must name for it."""
    command = [build.compiler(), "-print-file-name=libtsan.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    runtime = Path(done.stdout.strip())
    if not runtime.is_absolute():
        raise build.CannotBuild("the C compiler has no thread sanitizer")
    tried = subprocess.run(
        [sys.executable, "-c", ""],
        env={**os.environ, "LD_PRELOAD": str(runtime)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    if tried.returncode != 0:  # some kernels place memory where it cannot be
        raise build.CannotBuild("the thread sanitizer does not run here")
    return build._built(3, ("-O1", "-fsanitize=thread")), runtime


def address_sanitizer():
    return build.sanitized_library_path(), build.sanitizer_runtime()


@pytest.mark.parametrize("made", [address_sanitizer, thread_sanitizer])
def test_nothing_is_found(tmp_path, made):
    try:
        library, runtime = made()
    except build.CannotBuild as missing:
        pytest.skip(str(missing))
    options = f"exitcode={FOUND}"
    environment = {"ASAN_OPTIONS": f"detect_leaks=0:{options}", "TSAN_OPTIONS": options}
    with all_ended(Peers(library, tmp_path, LD_PRELOAD=str(runtime), **environment)) as peers:
        for peer in run_exchange(peers, 3, 40, 7):
            peer.close()
        sender, receiver = peers.pair()
        move_by_threads(sender, receiver)
        end_badly(sender, receiver)
    codes = [peer.process.returncode for peer in peers.all if peer is not sender]
    assert codes == [0] * 4


def end_badly(sender, receiver):
    """What fails, is lost or is left open frees its memory once, too."""
    assert sender.send("r", "t", 0, 10, "c") == receiver.receive("r", "t", 0, 11, "c") == SUCCESS
    assert sender.test_twice_at_once("r")[1][0] == FAILURE
    assert receiver.wait("r")[0][0] == FAILURE
    assert sender.send("r2", "t", 0, 10, "c") == receiver.receive("r2", "t", 0, 10, "c") == SUCCESS
    assert receiver.wait("r2") == [[SUCCESS, 1, 10]]  # and no flush
    assert receiver.receive("r3", "t", 20, 10, "c") == SUCCESS
    sender.kill()
    assert receiver.test_communicator("c")[0] == FAILURE
    receiver.close()
