"""What a call of libnrt can answer, and what is to be done about it.

Numbers and names are those of nrt_status.h. Every status is one of three things: nothing happened
and the call can be made again (`NrtRetry`), this call or request failed (`NrtRequestError`), or the
device of this process can't be used any more (`NrtWorkerError`). Some say one thing from one
function and another from the rest: `error_of` knows both.

So far this has run on a simulator of libnrt only.
"""

from enum import IntEnum


class NrtStatus(IntEnum):
    """nrt_status.h, without its prefix NRT_. 8 and 12 are nothing."""

    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    INVALID_HANDLE = 3
    RESOURCE = 4
    TIMEOUT = 5
    HW_ERROR = 6
    QUEUE_FULL = 7
    LOAD_NOT_ENOUGH_NC = 9
    UNSUPPORTED_NEFF_VERSION = 10
    FAIL_HOST_MEM_ALLOC = 11
    UNINITIALIZED = 13
    CLOSED = 14
    QUEUE_EMPTY = 15
    EXEC_UNIT_UNRECOVERABLE = 101
    EXEC_BAD_INPUT = 1002
    EXEC_COMPLETED_WITH_NUM_ERR = 1003
    EXEC_COMPLETED_WITH_ERR = 1004
    EXEC_NC_BUSY = 1005
    EXEC_OOB = 1006
    COLL_PENDING = 1100
    EXEC_HW_ERR_COLLECTIVES = 1200
    EXEC_HW_ERR_HBM_UE = 1201
    EXEC_HW_ERR_NC_UE = 1202
    EXEC_HW_ERR_DMA_ABORT = 1203
    EXEC_SW_NQ_OVERFLOW = 1204
    EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NETWORK_PROXY_FAILURE = 1206
    # Shorter words for the same.
    HBM_UE = EXEC_HW_ERR_HBM_UE
    NC_UE = EXEC_HW_ERR_NC_UE
    DMA_ABORT = EXEC_HW_ERR_DMA_ABORT
    SW_NQ_OVERFLOW = EXEC_SW_NQ_OVERFLOW
    REPAIRABLE_HBM_UE = EXEC_HW_ERR_REPAIRABLE_HBM_UE


class NrtError(Exception):
    """Raised when a call of libnrt fails. `name` is the library's: "NRT_INVALID"."""

    def __init__(self, function: str, status: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({int(status)})")
        self.function = function
        self.status = status
        self.name = name


class NrtRetry(NrtError):
    """Raised when nothing was done and the same call can succeed later."""


class NrtRequestError(NrtError):
    """Raised when this call or request failed, and others need not."""


class NrtWorkerError(NrtError):
    """Raised when nothing more can be done with this process's device. Only a new process can."""


class NrtUnsupported(Exception):
    """Raised when the loaded library lacks a function, or a generation of functions."""


class NrtMisuse(Exception):
    """Raised when we break the library's rules, before it is called: use after free or close, two
    tests of one request at once, a post before the connection is there. Always our own bug."""


_RETRY = {
    NrtStatus.QUEUE_FULL,
    NrtStatus.QUEUE_EMPTY,
    NrtStatus.EXEC_NC_BUSY,
    NrtStatus.COLL_PENDING,
}
_REQUEST = {
    NrtStatus.FAILURE,
    NrtStatus.INVALID,
    NrtStatus.INVALID_HANDLE,
    NrtStatus.RESOURCE,
    NrtStatus.LOAD_NOT_ENOUGH_NC,
    NrtStatus.UNSUPPORTED_NEFF_VERSION,
    NrtStatus.FAIL_HOST_MEM_ALLOC,
    NrtStatus.UNINITIALIZED,  # torch may start the runtime yet
    NrtStatus.EXEC_BAD_INPUT,
    NrtStatus.EXEC_COMPLETED_WITH_NUM_ERR,
    NrtStatus.EXEC_COMPLETED_WITH_ERR,
    NrtStatus.EXEC_OOB,
}
_OF_FUNCTION: dict[tuple[str, int], type[NrtError]] = {
    # It only looked whether something is there already.
    ("nrt_async_sendrecv_test_comm", NrtStatus.TIMEOUT): NrtRetry,
    ("nrt_async_sendrecv_test_request", NrtStatus.TIMEOUT): NrtRetry,
    ("nrt_tensor_check_output_completion", NrtStatus.TIMEOUT): NrtRetry,
    # Too many requests are pending: nothing was posted.
    ("nrt_async_sendrecv_send_tensor", NrtStatus.RESOURCE): NrtRetry,
    ("nrt_async_sendrecv_recv_tensor", NrtStatus.RESOURCE): NrtRetry,
}


def error_of(function: str, status: int, name: str) -> NrtError:
    """The error for what a function answered. What isn't known counts as the worst.

    A time-out is the worst, too, but where a function only looks: what was asked for can't be
    taken back and may still happen.
    """
    found = _OF_FUNCTION.get((function, status))
    if found is None:
        found = NrtRetry if status in _RETRY else NrtWorkerError
        found = NrtRequestError if status in _REQUEST else found
    return found(function, NrtStatus(status) if status in _KNOWN else status, name)


_KNOWN = {int(status) for status in NrtStatus}
