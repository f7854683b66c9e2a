"""What each status of libnrt means: again later, this request only, or the whole worker."""

import pytest

from neuron_di_bindings.nrt import (
    NrtError,
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
    NrtUnsupported,
    NrtWorkerError,
)
from neuron_di_bindings.nrt.status import error_of

# Number, what it means from an ordinary function. Written by hand from nrt_status.h.
MEANINGS = {
    1: NrtRequestError,
    2: NrtRequestError,
    3: NrtRequestError,
    4: NrtRequestError,
    5: NrtWorkerError,
    6: NrtWorkerError,
    7: NrtRetry,
    9: NrtRequestError,
    10: NrtRequestError,
    11: NrtRequestError,
    13: NrtRequestError,
    14: NrtWorkerError,
    15: NrtRetry,
    101: NrtWorkerError,
    1002: NrtRequestError,
    1003: NrtRequestError,
    1004: NrtRequestError,
    1005: NrtRetry,
    1006: NrtRequestError,
    1100: NrtRetry,
    **dict.fromkeys(range(1200, 1207), NrtWorkerError),
}
NAMES = {
    "SUCCESS": 0,
    "QUEUE_FULL": 7,
    "UNINITIALIZED": 13,
    "CLOSED": 14,
    "EXEC_UNIT_UNRECOVERABLE": 101,
    "EXEC_OOB": 1006,
    "COLL_PENDING": 1100,
    "EXEC_HW_ERR_COLLECTIVES": 1200,
    "EXEC_HW_ERR_HBM_UE": 1201,
    "HBM_UE": 1201,
    "EXEC_HW_ERR_NC_UE": 1202,
    "NC_UE": 1202,
    "EXEC_HW_ERR_DMA_ABORT": 1203,
    "DMA_ABORT": 1203,
    "EXEC_SW_NQ_OVERFLOW": 1204,
    "SW_NQ_OVERFLOW": 1204,
    "EXEC_HW_ERR_REPAIRABLE_HBM_UE": 1205,
    "REPAIRABLE_HBM_UE": 1205,
    "NETWORK_PROXY_FAILURE": 1206,
}


def test_the_statuses_are_those_of_the_header():
    assert {int(status) for status in NrtStatus} == {0, *MEANINGS}
    assert {name: int(NrtStatus[name]) for name in NAMES} == NAMES


@pytest.mark.parametrize("number", MEANINGS)
def test_every_status_means_one_of_three_things(number):
    error = error_of("nrt_execute", number, "NRT_X")
    assert type(error) is MEANINGS[number]
    assert (error.function, error.status, error.name) == ("nrt_execute", number, "NRT_X")
    assert str(error) == f"nrt_execute: NRT_X ({number})"
    assert isinstance(error.status, NrtStatus)


@pytest.mark.parametrize("number", [8, 12, 16, 1207, 99999, -1])
def test_what_is_not_known_counts_as_the_worst(number):
    error = error_of("nrt_execute", number, "UNKNOWN")
    assert type(error) is NrtWorkerError
    assert error.status == number


@pytest.mark.parametrize(
    ("function", "status", "kind"),
    [
        ("nrt_async_sendrecv_test_comm", NrtStatus.TIMEOUT, NrtRetry),
        ("nrt_tensor_check_output_completion", NrtStatus.TIMEOUT, NrtRetry),
        ("nrt_async_sendrecv_test_request", NrtStatus.TIMEOUT, NrtRetry),
        ("nrt_async_sendrecv_send_tensor", NrtStatus.RESOURCE, NrtRetry),
        ("nrt_async_sendrecv_recv_tensor", NrtStatus.RESOURCE, NrtRetry),
        ("nrt_async_sendrecv_connect", NrtStatus.RESOURCE, NrtRequestError),
        ("nrt_tensor_allocate", NrtStatus.RESOURCE, NrtRequestError),
        ("nrt_async_sendrecv_flush", NrtStatus.TIMEOUT, NrtWorkerError),
        ("nrt_async_sendrecv_init", NrtStatus.FAILURE, NrtRequestError),
    ],
)
def test_some_functions_mean_something_else(function, status, kind):
    assert type(error_of(function, status, "")) is kind


def test_the_tree_has_one_root_and_our_own_bugs_are_not_in_it():
    assert all(issubclass(each, NrtError) for each in (NrtRetry, NrtRequestError, NrtWorkerError))
    assert not issubclass(NrtMisuse, NrtError)
    assert not issubclass(NrtUnsupported, NrtError)
