"""Copies out of another process's GPU memory come after its kernels, and before it is closed."""

import numpy as np
import pytest
from contract.cuda_pair import UNTOUCHED, cuda_decode, cuda_peer, ended
from contract.fake_cuda import WHY_NOT, Steering, fake_runtime
from contract.numbered_blocks import bytes_of

from neuron_di.errors import KvChanged, PeerGone, PeerTimeout
from neuron_di.kv import Memory
from neuron_di_bindings.cuda_runtime import CudaError, CudaRuntime

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

KERNELS_VALUE = 200
# CUDA's that wait for every stream; the simulator's do not, so their calls are counted.
WAITING = ("cudaFree", "cudaFreeHost", "cuModuleUnload")


def test_bytes_are_copied_after_the_kernels_that_were_recorded():
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        peer.order("hold")
        peer.order("fill", number=KERNELS_VALUE)
        peer.order("record")
        token = decode.post(decode.receive_of([0, 1], [0, 1]))
        decode.until_waiting()
        assert not token.is_done()
        assert (decode.received == UNTOUCHED).all()
        peer.order("release")
        assert ended(token).error() is None
        assert (decode.received[:2] == KERNELS_VALUE).all()
        assert (decode.received[2:] == UNTOUCHED).all()


def test_without_waiting_for_them_old_bytes_would_come(monkeypatch):
    """So that the test above shows that it is waited."""
    monkeypatch.setattr(CudaRuntime, "wait_in_stream", lambda *_: None)
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        peer.order("hold")
        peer.order("fill", number=KERNELS_VALUE)
        peer.order("record")
        assert decode.move([0, 1], [0, 1]) is None
        assert decode.values()[:2].tolist() == [1, 2]


def test_later_kernels_of_the_peer_hold_nothing_up():
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        peer.order("fill", number=KERNELS_VALUE)
        peer.order("record", "hold")
        peer.order("fill", number=1)
        assert decode.move([3], [3]) is None
        assert (decode.received[3] == KERNELS_VALUE).all()


def test_kernels_that_never_end_cost_their_receives_and_no_later_byte_comes():
    with cuda_peer() as peer, cuda_decode(timeout_s=0.2) as decode:
        decode.connect(peer.region)
        peer.order("hold", "record")
        stuck, queued = (decode.post(decode.receive_of([n], [n])) for n in range(2))
        assert isinstance(ended(stuck).error(), PeerTimeout)
        assert isinstance(ended(queued).error(), PeerGone)
        assert isinstance(decode.move([2], [2]), PeerGone)
        peer.order("release")
        decode.connect(peer.region)
        assert decode.move([5], [5]) is None  # behind whatever was on its way
        assert decode.values().tolist() == [UNTOUCHED] * 5 + [6] + [UNTOUCHED] * 10


def test_a_peer_that_is_killed_before_its_kernels_end_ends_its_receives():
    with cuda_peer() as peer, cuda_decode(timeout_s=0.2) as decode:
        decode.connect(peer.region)
        peer.order("hold", "record")
        token = decode.post(decode.receive_of([0], [0]))
        decode.until_waiting()
        peer.kill()
        assert isinstance(ended(token).error(), PeerTimeout)
        before = [decode.steering.calls(name) for name in WAITING]
        decode.engine.close()
        assert (decode.received == UNTOUCHED).all()
        decode.pool.close()
        assert [decode.steering.calls(name) for name in WAITING] == before


def test_blocks_are_not_written_before_this_workers_kernels_are_done_with_them():
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        stream = decode.pool.runtime.create_stream()
        decode.steering.hold(stream)
        decode.pool.record(stream)
        token = decode.post(decode.receive_of([0], [0]))
        decode.until_waiting()
        assert (decode.received == UNTOUCHED).all()
        decode.steering.release()
        assert ended(token).error() is None
        assert decode.values()[0] == 1
        decode.pool.runtime.destroy_stream(stream)


def test_landing_memory_is_filled_beside_this_workers_kernels():
    landing = np.full(4096, UNTOUCHED, np.uint8)
    memory = Memory(landing.ctypes.data, len(landing))
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        decode.engine.register(memory)
        stream = decode.pool.runtime.create_stream()
        decode.steering.hold(stream)
        decode.pool.record(stream)
        assert ended(decode.post(decode.receive_of([6], [1], memory))).error() is None
        assert (bytes_of(memory)[512:1024] == 7).all()
        assert (landing[:512] == UNTOUCHED).all()
        decode.steering.release()
        decode.pool.runtime.destroy_stream(stream)


def test_blocks_that_are_given_up_while_they_are_read_are_not_taken():
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        peer.order("hold", "record")
        receive = decode.receive_of([0, 4], [0, 1])
        token = decode.post(receive)
        decode.until_waiting()
        peer.order("retire", number=4)
        peer.order("release")
        assert ended(token).error() is None
        assert isinstance(decode.engine.commit("peer", receive), KvChanged)


@pytest.mark.parametrize("how", ["disconnect", "close"])
def test_memory_is_closed_after_the_last_copy_out_of_it(how):
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        calls_before = decode.steering.calls("cudaIpcCloseMemHandle")
        decode.steering.delay(20_000)
        try:
            tokens = [decode.post(decode.receive_of([n], [n])) for n in range(4)]
            if how == "disconnect":
                decode.engine.disconnect("peer")
            else:
                decode.engine.close()
            assert [ended(token).error() for token in tokens] == [None] * 4
        finally:
            decode.steering.delay(0)
        assert decode.values()[:4].tolist() == [1, 2, 3, 4]
        decode.engine.close()
        assert decode.steering.calls("cudaIpcCloseMemHandle") == calls_before + 1


def test_memory_that_is_closed_too_early_would_be_noticed():
    """So that the test above shows that it is not."""
    runtime, steering = fake_runtime(), Steering.of()
    found = np.zeros(8, np.uint8)
    with cuda_peer() as peer:
        stream, address = runtime.create_stream(), runtime.open_memory(peer.region.memory_handle)
        steering.hold(stream)
        runtime.copy(found.ctypes.data, address, len(found), stream)
        runtime.close_memory(address)
        steering.release()
        try:
            with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
                runtime.synchronize(stream)
        finally:
            steering.recover()
        runtime.destroy_stream(stream)


def test_one_engine_that_ends_leaves_anothers_mapping_of_the_same_peer():
    with cuda_peer() as peer, cuda_decode() as decode:
        decode.connect(peer.region)
        with cuda_decode() as other:
            other.connect(peer.region)
            assert other.move([1], [1]) is None
        decode.connect(peer.region)  # once more, in the place of the first
        assert decode.move([2], [2]) is None
        assert decode.values()[2] == 3
