"""The status table: who is there, who gets no requests and why, what went wrong."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di.status import show_status
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import PROTOCOL_VERSION, WorkerRecord, WorkerStatus
from neuron_di_proxy.status import PairReport, ProxyStatus, StatusReport, WorkerReport


def record(role: str, number: int) -> WorkerRecord:
    return WorkerRecord(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(f"{role}-{number}"),
        incarnation=Incarnation("0" * 32),
        role=role,
        state="ready",
        pid=100 + number,
        model="m",
        model_digest="d",
        layout_digest="l",
        context_tokens=64,
        host="127.0.0.1",
        api_port=1,
        signal_host="127.0.0.1",
        signal_port=1,
        started_unix_s=0.0,
    )


def status(role: str, number: int, **fields: int) -> WorkerStatus:
    counts = {"num_blocks": 8, "num_blocks_free": 8, "num_waiting": 0, "num_running": 0}
    more = {"num_transferring": 0, "num_steps": 5}
    return WorkerStatus(record=record(role, number), **(counts | more | fields))


REPORT = StatusReport(
    proxy=ProxyStatus(pid=99, num_running=1, num_admitted=7, is_draining=False),
    workers=[
        WorkerReport(
            record=record("prefill", 0),
            status=status("prefill", 0, num_leases_ended=2, num_blocks_quarantined=3),
            health="up",
        ),
        WorkerReport(
            record=record("prefill", 1),
            unreachable="it said nothing",
            health="frozen",
            health_reason="it is silent",
        ),
        WorkerReport(record=record("decode", 0), unreachable="it said nothing", health="new"),
        WorkerReport(
            record=record("decode", 1),
            status=status("decode", 1),
            health="suspect",
            health_reason="it hung up",
        ),
    ],
    pairs=[
        PairReport(prefill=WorkerId("prefill-0"), decode=WorkerId("decode-0"), outcome="ok"),
        PairReport(
            prefill=WorkerId("prefill-0"),
            decode=WorkerId("decode-1"),
            outcome="failed",
            reason="no route",
        ),
    ],
)


@pytest.fixture
def answer() -> Iterator[list[bytes]]:
    """What a server answers, and its address behind it."""
    said = [msgspec.json.encode(REPORT)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said[0])

        def log_message(self, *_: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        said.append(f"http://127.0.0.1:{server.server_address[1]}".encode())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield said
        server.shutdown()
        thread.join()


def test_the_table_says_who_gets_requests_and_why_not(answer, capsys):
    assert show_status(answer[1].decode(), as_json=False) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    rows = {line.split()[0]: line.split()[1:4] for line in lines[2:6]}
    assert rows == {
        "prefill-0": ["prefill", "ready", "100"],
        "prefill-1": ["prefill", "frozen", "101"],
        "decode-0": ["decode", "unreachable", "100"],
        "decode-1": ["decode", "suspect", "101"],
    }
    words = "2 prompts whose KV nobody pulled in time, 3 blocks await a transfer's end"
    assert lines[6:] == [
        f"prefill-0 since its start: {words}",
        "prefill-1 gets no requests: it is silent",
        "decode-0 does not answer: it said nothing",
        "decode-1 gets no requests: it hung up",
        "prefill-0 cannot hand over to decode-1: no route",
    ]
    assert all(len(line) <= 80 for line in lines[1:6])


def test_as_json_it_is_the_answer_itself(answer, capsys):
    assert show_status(answer[1].decode() + "/", as_json=True) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StatusReport) == REPORT


def test_who_is_no_proxy(answer):
    answer[0] = b"<html>"
    with pytest.raises(RemoteProtocolError, match="is not a neuron-di proxy"):
        show_status(answer[1].decode(), as_json=False)
    for url in ("http://127.0.0.1:1", "ftp://here"):
        with pytest.raises(PeerGone, match="no proxy answers at"):
            show_status(url, as_json=False)
