"""The status table: who is there, who gets no requests and why, what went wrong."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from msgspec import structs
from worker_record import make_record

from neuron_di import status as status_module
from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di.status import show_status
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import (
    LANES_MAX,
    LaneStatus,
    WorkerRecord,
    WorkerStatus,
    encode_json,
    status_decoder,
)
from neuron_di_proxy.status import (
    PairReport,
    ProxyStatus,
    RefusedReport,
    StatusReport,
    WorkerReport,
)


def record(role: str, number: int) -> WorkerRecord:
    return make_record(
        worker_id=WorkerId(f"{role}-{number}"),
        incarnation=Incarnation("0" * 32),
        role=role,
        pid=100 + number,
        model="m",
        slots=8,
        connections=["decode-0", "decode-1"] if (role, number) == ("prefill", 0) else [],
    )


def status(role: str, number: int, **fields: object) -> WorkerStatus:
    counts = {"num_blocks": 8, "num_blocks_free": 8, "num_waiting": 0, "num_running": 0}
    more = {"num_transferring": 0, "num_steps": 5}
    return WorkerStatus(record=record(role, number), **(counts | more | fields))


REPORT = StatusReport(
    proxy=ProxyStatus(pid=99, num_running=1, num_admitted=7, is_draining=False),
    workers=[
        WorkerReport(
            record=record("prefill", 0),
            status=status(
                "prefill",
                0,
                num_leases_ended=2,
                num_blocks_quarantined=3,
                num_legs=3,
                num_blocks_free=5,
                num_blocks_cached=1,
            ),
            health="up",
            age_s=7300.0,
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
            self.send_response(404 if self.path.startswith("/v1/") else 200)
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
    assert lines[1:6] == [
        "worker     role     state        model  layout  load   KV  age  peers",
        "prefill-0  prefill  ready        m      l        3/8  25%   2h      2",
        "prefill-1  prefill  frozen       m      l          -    -    -      -",
        "decode-0   decode   unreachable  m      l          -    -    -      -",
        "decode-1   decode   suspect      m      l        0/8   0%    -      0",
    ]
    words = "2 prompts whose KV nobody pulled in time, 3 blocks await a transfer's end"
    assert lines[6:] == [
        f"prefill-0 since its start: {words}",
        "prefill-1 gets no requests: it is silent",
        "decode-0 does not answer: it said nothing",
        "decode-1 gets no requests: it hung up",
        "prefill-0 cannot hand over to decode-1: no route",
    ]
    assert all(len(line) <= 80 for line in lines[1:6])


def test_what_keeps_workers_from_being_used_is_said_by_name(answer, capsys, monkeypatch):
    good, other = REPORT.workers[0], REPORT.workers[3]
    workers = [
        good,
        structs.replace(
            other, health="up", health_reason="", why_alone="KV layout 12ab… differs from p's"
        ),
        structs.replace(good, record=record("prefill", 7), health="vanished", vanished_s=75.0),
    ]
    report = StatusReport(
        proxy=REPORT.proxy,
        siblings=[structs.replace(REPORT.proxy, pid=100, is_draining=True)],
        workers=workers,
        refused=[
            RefusedReport(key="/workers/decode/e.x/1", worker_id="decode-9", reason="no address"),
            RefusedReport(key="/workers/../x", worker_id="", reason="no key"),
        ],
        ignored={"value": 100_000, "key": 1},
        remarks=["2 workers have the name p: at a, b"],
    )
    answer[0] = msgspec.json.encode(report)
    for columns in ("100", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert show_status(answer[1].decode(), as_json=False) == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert lines[1] == "  and pid 100 draining, 1 request running, 7 since start"
        assert lines[4].split()[:3] == ["prefill-7", "prefill", "vanished"]
        assert [line for line in lines[6:] if "since its start" not in line] == [
            "2 workers have the name p: at a, b",
            "decode-1 gets no requests: KV layout 12ab… differs from p's",
            "prefill-7 answers, and is used; its key has been gone for 1m",
            "decode-9 is not used: no address",
            "/workers/../x is not used: no key",
            "100001 keys of the registry were left out since the start: key 1, value 100000",
        ]
        assert max(map(len, lines[2:6])) <= int(columns)


@pytest.mark.parametrize("columns", [10, 40, 60])
def test_a_narrow_terminal_wraps_the_lines_and_no_cell_is_cut(answer, capsys, monkeypatch, columns):
    answer[0] = msgspec.json.encode(REPORT)
    monkeypatch.setenv("COLUMNS", "80")
    assert show_status(answer[1].decode(), as_json=False) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show_status(answer[1].decode(), as_json=False) == 0
    assert capsys.readouterr().out == wide


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_long_names_leave_the_other_columns_whole(answer, capsys, monkeypatch, columns):
    name = "decode-with-a-rather-long-name-in-rack-17-of-hall-3-slot-3"
    long = structs.replace(
        record("decode", 0),
        worker_id=WorkerId(name),
        model="someone/A-Model-With-A-Rather-Long-Name-70B-Instruct",
        layout_digest="1f0c93aa77b1c2d3",
        slots=512,
    )
    worker = structs.replace(REPORT.workers[3], record=long, health="up", age_s=9e5)
    answer[0] = msgspec.json.encode(structs.replace(REPORT, workers=[worker], pairs=[]))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show_status(answer[1].decode(), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert max(map(len, lines)) <= columns
    for cell in ("decode ", "ready", "1f0c93aa…", "0/512", "0%", "10d"):
        assert cell in lines[1]
    assert "".join(line.split()[0] for line in lines[1:]) == name


def test_as_json_it_is_the_answer_itself(answer, capsys):
    assert show_status(answer[1].decode() + "/", as_json=True) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StatusReport) == REPORT


def test_who_is_no_proxy(answer):
    answer[0] = b"<html>"
    with pytest.raises(RemoteProtocolError, match="is not a neuron-di proxy"):
        show_status(answer[1].decode(), as_json=False)
    with pytest.raises(PeerGone, match="no proxy answers at"):
        show_status("http://127.0.0.1:1", as_json=False)


def test_an_address_with_a_path_is_told_from_one_without(answer):
    with pytest.raises(PeerGone, match=r"404: give the proxy's address, without /v1"):
        show_status(answer[1].decode() + "/v1", as_json=False)


def test_what_moves_kv_is_said_once_for_each_kind():
    chosen = {"engine": "shm", "reason": "handover: not offered by the peer; shm: chosen"}
    lanes = [LaneStatus(peer=f"prefill-{n}", connect_s=0.01, **chosen) for n in (2, 0, 1)]
    other = {"engine": "tcp", "reason": "shm: it is\x1b[2J gone; tcp: chosen"}
    lanes.append(LaneStatus(peer="prefill-9", connect_s=0.5, **other))
    worker = WorkerReport(record=record("decode", 0), status=status("decode", 0, lanes=lanes))
    report = msgspec.structs.replace(REPORT, workers=[worker])
    assert list(status_module.lanes(report)) == [
        f"decode-0 takes KV from prefill-0, prefill-1, prefill-2 by shm ({chosen['reason']})",
        "decode-0 takes KV from prefill-9 by tcp (shm: it is?[2J gone; tcp: chosen)",
    ]


def test_of_many_peers_some_are_named():
    lanes = [
        LaneStatus(peer=f"prefill-{n}", engine="shm", reason="shm: chosen", connect_s=0.0)
        for n in range(9)
    ]
    worker = WorkerReport(record=record("decode", 0), status=status("decode", 0, lanes=lanes))
    (line,) = status_module.lanes(msgspec.structs.replace(REPORT, workers=[worker]))
    assert "prefill-3 and 5 more by shm" in line


def test_a_status_with_all_its_lanes_can_be_read():
    lane = LaneStatus(peer="p" * 64, engine="e" * 32, reason="é" * 300, connect_s=0.1)
    full = status("decode", 0, lanes=[lane] * LANES_MAX)
    assert len(status_decoder.decode(encode_json(full)).lanes) == LANES_MAX


def test_who_gives_no_kv_any_more_is_not_named():
    lanes = [
        LaneStatus(peer=f"prefill-{n}", engine="shm", reason="shm: chosen", connect_s=0.0)
        for n in (0, 1)
    ]
    receiver = WorkerReport(record=record("decode", 0), status=status("decode", 0, lanes=lanes))
    changed = structs.replace(record("prefill", 1), role="decode")
    workers = [receiver, WorkerReport(record=changed)]
    lines = list(status_module.lanes(structs.replace(REPORT, workers=workers)))
    assert lines == ["decode-0 takes KV from prefill-0 by shm (shm: chosen)"]


def test_two_processes_of_one_name_are_told_apart_and_roles_are_together(answer, capsys):
    again = structs.replace(
        record("decode", 0), incarnation=Incarnation("abcdef0123"), started_unix_s=5.0
    )
    records = (again, record("decode", 0), record("prefill", 1), record("prefill", 0))
    workers = [WorkerReport(record=each) for each in records]
    answer[0] = msgspec.json.encode(structs.replace(REPORT, workers=workers))
    assert show_status(answer[1].decode(), as_json=False) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert rows == ["prefill-0", "prefill-1", "decode-0 (000000)", "decode-0 (abcdef)"]
