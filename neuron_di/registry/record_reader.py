"""From a key and a value of the registry to a worker's record, or why it is none.

Whatever stands in a registry was written by somebody else. What is no record of a worker that
this version understands, at its own key and at an address where a worker may be, is left out,
counted by the kind of its fault, and remembered by name as long as there are few.
"""

import re
from collections import Counter
from typing import Literal, NamedTuple

from neuron_di.config import WorkerAddressOptions
from neuron_di.errors import RemoteProtocolError
from neuron_di.obs import LimitedLogger
from neuron_di.types import WORKER_ID_PATTERN
from neuron_di.wire import (
    PROTOCOL_VERSION,
    RECORD_BYTES_MAX,
    WorkerRecord,
    record_decoder,
    record_head_decoder,
)

REFUSED_MAX = 64  # that are remembered by name
COUNTED_MAX = 1 << 17  # that are remembered not to be counted again
_SHOWN_CHARS = 120

Fault = Literal["key", "size", "value", "version", "place", "address", "too many"]

_KEY = re.compile(r"/workers/(prefill|decode|both)/[^/\s]{1,128}/[0-9]{1,5}")
_log = LimitedLogger(__name__)


class RefusedRecord(NamedTuple):
    """A key whose worker is not used. `worker_id` is empty where it does not say so."""

    key: str
    worker_id: str
    reason: str


class _Unreadable(Exception):
    def __init__(self, fault: Fault, reason: str, worker_id: str = "") -> None:
        super().__init__(reason)
        self.fault: Fault = fault
        self.reason = reason
        self.worker_id = worker_id


def is_record(key: str, value: bytes) -> bool:
    """Whether this is a record of this version at its own key, wherever its worker may be."""
    if _KEY.fullmatch(key) is None:
        return False
    try:
        record = record_decoder.decode(value)
    except RemoteProtocolError:
        return False
    return record.protocol_version == PROTOCOL_VERSION and record.key() == key


class RecordReader:
    """Reads records for a directory.

    `num_refused` counts what was none, by its fault: a key and its value once, however often they
    are read.
    """

    def __init__(self, addresses: WorkerAddressOptions) -> None:
        self._addresses = addresses
        self._refused: dict[str, RefusedRecord] = {}  # by key, the latest last
        self._counted: dict[int, int] = {}  # hash of a key: of what was counted at it
        self._counted_before: dict[int, int] = {}  # until every key was read anew
        self.num_refused: Counter[Fault] = Counter()

    def read(self, key: str, value: bytes) -> WorkerRecord | None:
        """The record at a key; None where there is none."""
        try:
            record = self._read(key, value)
        except _Unreadable as unreadable:
            words = unreadable.reason
            self.refuse(key, unreadable.fault, words, unreadable.worker_id, value=value)
            return None
        self.forget(key)
        return record

    def refuse(
        self, key: str, fault: Fault, reason: str, worker_id: str = "", *, value: bytes = b""
    ) -> None:
        """Count a key that is left out, and remember it by name."""
        self._count(key, fault, value)
        _log.warning("record_ignored", key=key[:_SHOWN_CHARS], reason=reason)
        self._refused.pop(key, None)
        while len(self._refused) >= REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        shown = key[:_SHOWN_CHARS]
        self._refused[key] = RefusedRecord(shown, worker_id, reason[: 2 * _SHOWN_CHARS])

    def forget(self, key: str) -> None:
        """The key is gone, or has a record."""
        self._refused.pop(key, None)
        if self._counted:
            self._counted.pop(hash(key), None)

    def forget_all(self) -> None:
        """Every key is read anew."""
        self._refused.clear()
        self._counted_before, self._counted = self._counted, {}

    def all_read(self) -> None:
        """Every key was."""
        self._counted_before = {}

    def refused(self) -> list[RefusedRecord]:
        """The keys that are left out now, the latest REFUSED_MAX of them."""
        return list(self._refused.values())

    def _count(self, key: str, fault: Fault, value: bytes) -> None:
        name, what = hash(key), hash((fault, value))
        if what not in (self._counted.get(name), self._counted_before.get(name)):
            self.num_refused[fault] += 1
        if name in self._counted or len(self._counted) < COUNTED_MAX:
            self._counted[name] = what

    def _read(self, key: str, value: bytes) -> WorkerRecord:
        if _KEY.fullmatch(key) is None:
            raise _Unreadable("key", "this is no worker's key")
        if len(value) > RECORD_BYTES_MAX:
            raise _Unreadable("size", f"{len(value)} bytes are no record")
        try:
            record = record_decoder.decode(value)
        except RemoteProtocolError as error:
            raise self._of_other_version(value, error.message) from None
        if record.protocol_version != PROTOCOL_VERSION:
            raise self._of_other_version(value, "")
        worker_id = record.worker_id
        if record.key() != key:
            raise _Unreadable("place", f"the record belongs at {record.key()}", worker_id)
        reason = self._addresses.why_refused(record.host, record.api_port)
        if not reason and record.signal_port:
            reason = self._addresses.why_refused(record.signal_host, record.signal_port)
        if reason:
            raise _Unreadable("address", reason, worker_id)
        return record

    def _of_other_version(self, value: bytes, reason: str) -> _Unreadable:
        """Another version's record may be unreadable for no other reason."""
        try:
            head = record_head_decoder.decode(value)
        except RemoteProtocolError:
            return _Unreadable("value", reason)
        worker_id = head.worker_id if re.fullmatch(WORKER_ID_PATTERN, head.worker_id) else ""
        words = head.why_not_understood()
        return _Unreadable("version" if words else "value", words or reason, worker_id)
