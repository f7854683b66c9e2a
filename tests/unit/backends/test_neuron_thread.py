"""One thread for all calls of a device, and which of their errors mean that it is lost."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_di.backends.neuron_faults import lost_by
from neuron_di.backends.neuron_thread import DeviceThread
from neuron_di.errors import BackendLost, LocalProtocolError
from neuron_di_bindings.nrt import NrtRequestError, NrtRetry, NrtStatus, NrtWorkerError

WAIT_S = 30.0


@pytest.fixture
def thread():
    thread = DeviceThread()
    yield thread
    thread.close()


def test_all_calls_are_made_by_one_thread(thread):
    with ThreadPoolExecutor(4) as callers:
        idents = set(callers.map(lambda _: thread.run(threading.get_ident, WAIT_S), range(40)))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_calls_run_in_the_order_of_asking(thread):
    gate, order = threading.Event(), []
    with ThreadPoolExecutor(5) as callers:
        callers.submit(thread.run, gate.wait, WAIT_S)
        for number in range(4):
            callers.submit(thread.run, lambda number=number: order.append(number), WAIT_S)
            while thread._calls.qsize() <= number:
                pass
        gate.set()
    assert order == [0, 1, 2, 3]


def test_errors_are_the_callers(thread):
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        thread.run(fail, WAIT_S)
    assert thread.run(lambda: 3, WAIT_S) == 3


def test_a_call_that_takes_too_long_is_given_up(thread):
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer of the device within 0\.01 s"):
        thread.run(gate.wait, 0.01)
    gate.set()

    def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.run(fail, WAIT_S)


def test_nothing_of_a_call_is_kept(thread):
    class Large:
        pass

    large = Large()
    watch = weakref.ref(large)
    thread.run(lambda large=large: None, WAIT_S)
    del large
    thread.run(lambda: None, WAIT_S)
    gc.collect()
    assert watch() is None


def test_after_its_end_nothing_runs(thread):
    thread.close()
    thread.close()
    assert not thread._thread.is_alive()
    with pytest.raises(LocalProtocolError, match="has ended"):
        thread.run(lambda: None, WAIT_S)


@pytest.mark.parametrize(
    "error",
    [
        NrtWorkerError("nrt_execute", NrtStatus.NC_UE, "NRT_EXEC_HW_ERR_NC_UE"),
        BackendLost("gone"),
        TimeoutError("no answer"),
        RuntimeError("The PyTorch Neuron Runtime failed: NRT_EXEC_UNIT_UNRECOVERABLE(101)"),
        RuntimeError("nrt_execute status=1203 (NRT_EXEC_HW_ERR_DMA_ABORT)"),
        RuntimeError("execution failed: status_code=1200, message=..."),
        RuntimeError("Status Code: 1206"),
        RuntimeError("NRT_EXEC_HW_ERR_DMA_ABORT"),
        RuntimeError("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"),
        RuntimeError("NRT_TIMEOUT while waiting"),
        RuntimeError("NRT_CLOSED"),
        RuntimeError("nrt_execute: NRT_UNINITIALIZED (13)"),
        NrtRequestError("nrt_execute", NrtStatus.UNINITIALIZED, "NRT_UNINITIALIZED"),
        RuntimeError("nrt_execute failed with status code 5"),
        RuntimeError("NEURON_RT error, status 101"),
    ],
)
def test_losses(error):
    assert isinstance(lost_by(error), BackendLost)


@pytest.mark.parametrize(
    "error",
    [
        NrtRequestError("nrt_tensor_read", NrtStatus.INVALID, "NRT_INVALID"),
        NrtRetry("nrta_execute_schedule", NrtStatus.QUEUE_FULL, "NRT_QUEUE_FULL"),
        RuntimeError("nrt_execute status=1002 (NRT_EXEC_BAD_INPUT)"),
        RuntimeError("nrt_execute status=4 (NRT_RESOURCE)"),
        RuntimeError("status=0 NRT_SUCCESS"),
        RuntimeError("shape [1203, 101] does not match"),
        RuntimeError("no status here"),
        RuntimeError("HTTP status 5"),
        RuntimeError("the download ended with status 101"),
        RuntimeError("NRT_SOMETHING_NEW"),
        RuntimeError("NRT_EXEC_COMPLETED_WITH_NUM_ERR"),
        ValueError("status=1203"),
        KeyError("NRT_CLOSED"),
    ],
)
def test_what_is_no_loss(error):
    assert lost_by(error) is None
