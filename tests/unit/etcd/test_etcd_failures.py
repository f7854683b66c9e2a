"""What a failed call means."""

import grpc
import pytest

from neuron_di.errors import PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.etcd.failures import (
    AnswerTooLarge,
    CorruptData,
    HistoryGone,
    Mend,
    NoSpace,
    PermissionDenied,
    UnknownLease,
    failure_of,
)

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "kind", "mend", "may_have_happened"),
    [
        (Code.UNAVAILABLE, "failed to connect to all addresses", PeerGone, "ANOTHER_TRY", False),
        (Code.UNAVAILABLE, "etcdserver: no leader", PeerGone, "ANOTHER_TRY", False),
        (Code.UNAVAILABLE, "etcdserver: leader changed", PeerGone, "ANOTHER_TRY", True),
        (Code.UNAVAILABLE, "etcdserver: request timed out", PeerTimeout, "ANOTHER_TRY", True),
        (Code.UNKNOWN, "context deadline exceeded", PeerTimeout, "ANOTHER_TRY", True),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", PeerTimeout, "ANOTHER_TRY", True),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", PeerGone, "ANOTHER_TRY", True),
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", PeerRefused, "NEW_TOKEN", False),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", PeerRefused, "NEW_TOKEN", False),
        (Code.PERMISSION_DENIED, "permission denied", PermissionDenied, "NOTHING", False),
        (Code.NOT_FOUND, "requested lease not found", UnknownLease, "NOTHING", False),
        (Code.OUT_OF_RANGE, "revision has been compacted", HistoryGone, "NOTHING", False),
        (Code.RESOURCE_EXHAUSTED, "database space exceeded", NoSpace, "NOTHING", False),
        (Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)",
         AnswerTooLarge, "NOTHING", False),
        (Code.RESOURCE_EXHAUSTED, "Stream removed (CLIENT: Received message larger than max (9))",
         AnswerTooLarge, "NOTHING", False),
        (Code.INVALID_ARGUMENT, "key is not provided", PeerRefused, "NOTHING", False),
        (Code.UNIMPLEMENTED, "unknown service", RemoteProtocolError, "ANOTHER_TRY", False),
        (Code.INTERNAL, None, RemoteProtocolError, "ANOTHER_TRY", True),
        (Code.UNKNOWN, "raft: stopped", PeerGone, "ANOTHER_TRY", True),
        (Code.UNKNOWN, "Stream removed (RST_STREAM)", PeerGone, "ANOTHER_TRY", True),
        (Code.DATA_LOSS, "etcdserver: corrupt cluster", CorruptData, "NOTHING", False),
    ],
)  # fmt: skip
def test_failures(code, details, kind, mend, may_have_happened):
    failure = failure_of(code, details, "host:1")
    assert type(failure.error) is kind
    assert failure.mend is Mend[mend]
    assert failure.may_have_happened is may_have_happened


def test_someone_elses_words_are_one_short_line():
    failure = failure_of(Code.INTERNAL, "a\x1b[31m" + "b" * 1000 + "\nsecond line", "host:1")
    assert len(failure.error.message) < 300
    assert failure.error.message.isprintable()


@pytest.mark.parametrize(
    ("words", "is_tls"),
    [
        ("Socket closed", True),  # it speaks TLS, we do not
        ("Unwrap failed (TSI_DATA_CORRUPTED)", True),  # it asks for a certificate
        ("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", True),
        ("Failed to connect to remote host: connect: Connection refused (111)", False),
    ],
)
def test_who_forgot_tls_is_told_where_to_look(words, is_tls):
    details = (
        f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1.2.3.4:5: {words}"
    )
    message = failure_of(Code.UNAVAILABLE, details, "host:1").error.message
    assert ("doctor --only etcd" in message) is is_tls
