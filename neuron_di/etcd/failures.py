"""What a failed call to etcd means: whether to try again, elsewhere or with a new token.

Words come from etcd or gRPC, neither of which repeats a password; they are cut to one line.
"""

from dataclasses import dataclass
from enum import Enum, auto

from neuron_di.errors import PeerError, PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.etcd.packages import grpc
from neuron_di.terminal_text import printable

WORDS_MAX = 200

_NO_TOKEN = (
    "invalid auth token",
    "user name is empty",  # authentication was switched on after we connected
    "user name not found",
    "revision of auth store is old",  # users or roles were changed meanwhile
)
_NO_SPACE = "database space exceeded"
_CORRUPT = "corrupt cluster"
_TOO_LARGE = "received message larger than max"
# What etcd says, under any code, when it gave up in the middle of it.
_GAVE_UP = ("context deadline exceeded", "context canceled", "proposal dropped", "timed out")
_BUSY_OR_ENDED = ("too many requests", "stream removed", "raft: stopped")  # likewise
_NOT_SENT = ("failed to connect", "no leader", "connection refused", "name resolution")
# How a connection fails where one end speaks TLS and the other does not, or is not believed.
_TLS_FAILED = ("socket closed", "tsi_data_corrupted", "handshake", "ssl", "certificate")

_Code = grpc.StatusCode
_UNREACHABLE = {_Code.UNAVAILABLE, _Code.ABORTED, _Code.CANCELLED}
_REFUSED = {
    _Code.PERMISSION_DENIED,
    _Code.UNAUTHENTICATED,
    _Code.INVALID_ARGUMENT,
    _Code.FAILED_PRECONDITION,
    _Code.NOT_FOUND,
    _Code.ALREADY_EXISTS,
    _Code.OUT_OF_RANGE,
    _Code.RESOURCE_EXHAUSTED,
}


class HistoryGone(PeerError):
    """Raised when a revision was compacted, or is of an etcd that is no more: list again."""

    code = "history_gone"


class UnknownLease(PeerRefused):
    """Raised when etcd does not know a lease, or no more."""


class PermissionDenied(PeerRefused):
    """Raised when our user may not do this with these keys."""


class NoSpace(PeerRefused):
    """Raised when etcd's disk quota is used up, and it takes no writes."""


class CorruptData(PeerRefused):
    """Raised when etcd found that its members do not agree on what they store."""


class AnswerTooLarge(RemoteProtocolError):
    """Raised when an answer is larger than a message may be: ask for less at once."""


class Mend(Enum):
    """What may help after a failure."""

    NOTHING = auto()
    ANOTHER_TRY = auto()
    NEW_TOKEN = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """`may_have_happened`: etcd may have done what was asked although no answer came."""

    error: PeerError
    mend: Mend = Mend.NOTHING
    may_have_happened: bool = False


def wants_token(words: str) -> bool:
    """Whether etcd says that our token is not good, or that there is none."""
    lower = words.lower()
    return any(each in lower for each in _NO_TOKEN)


def refused_token(words: str) -> PeerRefused:
    """The error for that."""
    return PeerRefused(f"etcd refused: {words}{_hint(words.lower())}")


def failure_of(code: grpc.StatusCode, details: str | None, endpoint: str) -> Failure:
    """The failure that gRPC reports by `code` and `details` for a call to `endpoint`."""
    words = one_line(details)
    lower = words.lower()
    if wants_token(words):
        return Failure(refused_token(words), Mend.NEW_TOKEN)
    if code is _Code.DEADLINE_EXCEEDED or any(each in lower for each in _GAVE_UP):
        late = PeerTimeout(f"etcd at {endpoint} did not answer in time")
        return Failure(late, Mend.ANOTHER_TRY, may_have_happened=True)
    is_busy = any(each in lower for each in _BUSY_OR_ENDED) and _TOO_LARGE not in lower
    if code in _UNREACHABLE or is_busy:
        gone = PeerGone(f"etcd at {endpoint} cannot be reached: {words}{_hint(lower)}")
        was_sent = not any(each in lower for each in _NOT_SENT)
        return Failure(gone, Mend.ANOTHER_TRY, may_have_happened=was_sent)
    error = _refusal(code, words, endpoint)
    if type(error) is RemoteProtocolError:  # of this member: the others may be well
        was_sent = code is not _Code.UNIMPLEMENTED
        return Failure(error, Mend.ANOTHER_TRY, may_have_happened=was_sent)
    return Failure(error)


def _refusal(code: grpc.StatusCode, words: str, endpoint: str) -> PeerError:
    lower = words.lower()
    if _TOO_LARGE in lower:
        return AnswerTooLarge(f"etcd at {endpoint} answered with more than we take at once")
    if _NO_SPACE in lower:
        return NoSpace(
            "etcd has no space left and takes no writes (alarm NOSPACE): compact and defragment "
            "it or raise its --quota-backend-bytes, then `etcdctl alarm disarm`"
        )
    if _CORRUPT in lower:
        return CorruptData(
            "etcd found its data corrupt and takes no writes (alarm CORRUPT): replace the member "
            "that `etcdctl alarm list` names, then `etcdctl alarm disarm`"
        )
    if code is _Code.OUT_OF_RANGE and "compacted" in lower:
        return HistoryGone("etcd has compacted this revision")
    if code is _Code.OUT_OF_RANGE and "future revision" in lower:
        return HistoryGone("this is another etcd than before, with fewer revisions")
    if code is _Code.NOT_FOUND and "lease" in lower:
        return UnknownLease("etcd does not know the lease")
    if code is _Code.PERMISSION_DENIED:
        return PermissionDenied(
            "etcd refused: permission denied; grant our user a role for the prefix (docs/etcd.md)"
        )
    if code in _REFUSED:
        return PeerRefused(f"etcd refused: {words}")
    return RemoteProtocolError(f"{endpoint} does not answer as etcd does: {words}")


def one_line(details: str | None, chars_max: int = WORDS_MAX) -> str:
    """Someone else's words, fit for a log."""
    line = (details or "no reason given").partition("\n")[0].removeprefix("etcdserver: ")
    return printable(line[:chars_max])


def _hint(lower: str) -> str:
    if "user name is empty" in lower:
        return "; give --etcd-user, or a certificate whose common name is a user"
    if "failed to connect" in lower and any(each in lower for each in _TLS_FAILED):
        return "; is it TLS? `neuron-di doctor --only etcd` with the same --etcd flags says"
    return ""
