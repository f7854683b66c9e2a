"""Checks the traces of simulated processes against the contract of libnrt.

Reads the lines that NRT_SIM_TRACE gathered (trace.c says what is in them) and lists what breaks a
rule, although each call may have returned SUCCESS: what was opened is closed, nothing is called
before or after, nothing is posted on a communicator that was not seen connected, every posted
request is seen done before its lnc closes, received bytes are not read before a flush that began
after they arrived, bytes under way are left alone, and nothing is left to free at nrt_close.

A model's reads are not in a trace: bytes that it used before a flush show in what it computes.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUCCESS, UNINITIALIZED, CLOSED = 0, 13, 14
_POSTS = {
    "nrt_async_sendrecv_send_tensor": "send",
    "nrt_async_sendrecv_recv_tensor": "receive",
}


@dataclass(kw_only=True, slots=True)
class Transfer:
    """A posted request. Offsets are those of the tensor that owns the memory."""

    kind: str
    lnc: int
    tensor: int
    first: int
    end: int
    done_us: int | None = None

    def overlaps(self, tensor: int, first: int, end: int) -> bool:
        return self.tensor == tensor and self.first < end and first < self.end


@dataclass(slots=True)
class Process:
    """What one process has open. `problems` are sentences without the process's number."""

    problems: list[str] = field(default_factory=list)
    is_open: bool = False
    has_died: bool = False
    slices: dict[int, tuple[int, int]] = field(default_factory=dict)
    lnc_of: dict[int, int] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    open_lncs: set[int] = field(default_factory=set)
    transfers: dict[int, Transfer] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        """Applies one line of the trace, in the file's order."""
        if "event" in line:
            self._event(line["event"], line)
            return
        name, status = line["call"], line["status"]
        if status in (UNINITIALIZED, CLOSED):
            self.problems.append(f"{name} while the runtime is not open")
        if status != SUCCESS:
            return
        if name in _POSTS:
            self._post(_POSTS[name], line)
        else:
            handler = getattr(self, f"_{name}", None)
            if handler is not None:
                handler(line)

    def end(self) -> None:
        """Nothing follows: what may not be left open?"""
        if self.is_open and not self.has_died:
            self.problems.append("nrt_init without nrt_close")

    def _event(self, name: str, line: dict[str, Any]) -> None:
        if name == "violation":
            self.problems.append(f"violation: {line['text']}")
        elif name == "die":
            self.has_died = True
        elif name == "leak":
            self.problems.append(f"{line['count']} {line['kind']} left at nrt_close")
        elif name == "batch_read":
            self._nrt_tensor_read(line)
        elif name == "batch_write":
            self._nrt_tensor_write(line)

    def _nrt_init(self, line: dict[str, Any]) -> None:
        self.is_open = True

    def _nrt_close(self, line: dict[str, Any]) -> None:
        self.is_open = False
        self.problems.extend(f"nrt_close with lnc {lnc} open" for lnc in sorted(self.open_lncs))
        self.open_lncs.clear()

    def _nrt_tensor_allocate_slice(self, line: dict[str, Any]) -> None:
        source, offset = self._owner(line["source"], line["offset"])
        self.slices[line["tensor"]] = (source, offset)

    def _owner(self, tensor: int, offset: int) -> tuple[int, int]:
        source, start = self.slices.get(tensor, (tensor, 0))
        return source, start + offset

    def _nrt_async_sendrecv_init(self, line: dict[str, Any]) -> None:
        self.open_lncs.add(line["lnc"])

    def _nrt_async_sendrecv_close(self, line: dict[str, Any]) -> None:
        lnc = line["lnc"]
        self.open_lncs.discard(lnc)
        mine = [request for request, transfer in self.transfers.items() if transfer.lnc == lnc]
        for request in mine:
            transfer = self.transfers.pop(request)
            if transfer.done_us is None:
                self.problems.append(f"lnc {lnc} closed before request {request} was seen done")

    def _nrt_async_sendrecv_connect(self, line: dict[str, Any]) -> None:
        self.lnc_of[line["communicator"]] = line["lnc"]

    _nrt_async_sendrecv_accept = _nrt_async_sendrecv_connect

    def _nrt_async_sendrecv_test_comm(self, line: dict[str, Any]) -> None:
        if line.get("done"):
            self.connected.add(line["communicator"])

    def _post(self, kind: str, line: dict[str, Any]) -> None:
        communicator = line["communicator"]
        if communicator not in self.connected:
            self.problems.append(f"a {kind} on a communicator that was not seen connected")
        tensor, first = self._owner(line["tensor"], line["offset"])
        end = first + line["size"]
        for other in self.transfers.values():
            if (
                other.done_us is None
                and "receive" in (kind, other.kind)
                and other.overlaps(tensor, first, end)
            ):
                self.problems.append(f"a {kind} of bytes that a {other.kind} works on")
        lnc = self.lnc_of.get(communicator, -1)
        self.transfers[line["request"]] = Transfer(
            kind=kind, lnc=lnc, tensor=tensor, first=first, end=end
        )

    def _nrt_async_sendrecv_test_request(self, line: dict[str, Any]) -> None:
        request = line["request"]
        if not line.get("done") or request not in self.transfers:
            return
        if self.transfers[request].kind == "send":
            del self.transfers[request]
        else:
            self.transfers[request].done_us = line["t"]

    def _nrt_async_sendrecv_flush(self, line: dict[str, Any]) -> None:
        began_us = line["t"] - line["us"]
        for request, transfer in list(self.transfers.items()):
            is_there = transfer.done_us is not None and transfer.done_us <= began_us
            if transfer.lnc == line["lnc"] and is_there:
                del self.transfers[request]

    def _nrt_tensor_read(self, line: dict[str, Any]) -> None:
        self._read(line["tensor"], line["offset"], line["size"])

    def _nrt_tensor_write(self, line: dict[str, Any]) -> None:
        self._write(line["tensor"], line["offset"], line["size"])

    def _nrt_tensor_copy(self, line: dict[str, Any]) -> None:
        self._read(line["source"], line["source_offset"], line["size"])
        self._write(line["destination"], line["destination_offset"], line["size"])

    _nrt_tensor_memset = _nrt_tensor_write
    # Scheduled work counts at once: it may run before what would have made it safe.
    _nrta_tensor_read = _nrt_tensor_read
    _nrta_tensor_write = _nrt_tensor_write
    _nrta_tensor_copy = _nrt_tensor_copy

    def _read(self, tensor: int, offset: int, num_bytes: int) -> None:
        owner, first = self._owner(tensor, offset)
        for transfer in self.transfers.values():
            if transfer.kind == "receive" and transfer.overlaps(owner, first, first + num_bytes):
                state = "before a flush" if transfer.done_us is not None else "before they arrived"
                self.problems.append(f"received bytes of lnc {transfer.lnc} are read {state}")

    def _write(self, tensor: int, offset: int, num_bytes: int) -> None:
        owner, first = self._owner(tensor, offset)
        for transfer in self.transfers.values():
            if transfer.done_us is None and transfer.overlaps(owner, first, first + num_bytes):
                self.problems.append(f"bytes that a {transfer.kind} works on are written")


def problems(lines: Iterable[str]) -> list[str]:
    """What breaks a rule, each with the number of its process; empty is good."""
    processes: dict[int, Process] = defaultdict(Process)
    for text in lines:
        line = json.loads(text)
        processes[line["pid"]].take(line)
    for process in processes.values():
        process.end()
    return [f"process {pid}: {each}" for pid in processes for each in processes[pid].problems]


def check_trace(path: Path) -> None:
    """Raises AssertionError with all problems of a trace, and when there is nothing in it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = problems(lines)
    if found or not lines:
        raise AssertionError("\n".join(found) or f"{path} is empty")


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())) or 0)
