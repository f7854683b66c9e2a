"""What fails is named, and takes nobody else's figures with it. Both ends are in this process."""

import ctypes
import os
import socket
import threading

import pytest
from contract.fake_cuda import WHY_NOT, library_path

from neuron_di.errors import ConfigError, PeerGone, PeerRefused
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer import LaneSet, TransferToken
from neuron_di.transfer_bench import measuring_end
from neuron_di.transfer_bench.control_link import ControlLink, make_key
from neuron_di.transfer_bench.measure import _grouped, measure
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.open_lanes import open_lanes
from neuron_di.transfer_bench.pool_bytes import stream_of
from neuron_di.transfer_bench.serving_end import ServingEnd
from neuron_di.transfer_bench.shape import Shape

SHAPES = [Shape.of("64KiB"), Shape.of("10x4KiB")]
REPEATS = 3


@pytest.fixture
def end():
    """A measuring end. The serving one is on a thread, which ends with it."""
    key = make_key()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            sock, _ = listener.accept()
            ServingEnd(ControlLink.answer(sock, key), os.getpid()).serve()

        thread = threading.Thread(target=serve)
        thread.start()
        end = MeasuringEnd(ControlLink.ask(*listener.getsockname(), key), has_arena=True)
        yield end
        end.close()
        thread.join()


class Faulty:
    """An engine that does as another, but for one fault."""

    def __init__(self, engine, fault, pool):
        self._engine = engine
        self._fault = fault
        self._pool = pool
        self._num_posted = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def connect(self, peer, region, layout):
        if self._fault == "connect":
            raise PeerRefused("not today")
        self._engine.connect(peer, region, layout)

    def post_receive(self, peer, receive):
        self._num_posted += 1
        if self._fault == "move" and self._num_posted == 4:  # the second that counts
            token = TransferToken()
            token.complete(PeerGone("out of reach"))
            return token
        return self._engine.post_receive(peer, receive)

    def commit(self, peer, receive):
        if self._fault == "commit":
            raise ValueError("a bug of an engine")
        error = self._engine.commit(peer, receive)
        if self._fault == "bytes" and self._num_posted == 4:
            address = receive.memory.address + int(receive.runs.destination_offsets[0])
            self._spoil(address)
        return error

    def _spoil(self, address):
        if not isinstance(self._pool, DevicePool):
            byte = ctypes.c_uint8.from_address(address)
            byte.value ^= 1
            return
        with stream_of(self._pool) as stream:  # a run of random bytes is not of one
            address += self._pool.device_address - self._pool.memory().address
            self._pool.runtime.fill(address, 0, 4096, stream)


@pytest.fixture
def plant(monkeypatch):
    """Give one engine of the measuring end a fault."""

    def plant(name, fault):
        def faulty_lanes(engine, pool, host, options):
            if engine != name:
                return open_lanes(engine, pool, host, options)
            if fault == "open":
                raise ConfigError("not here")
            lanes = open_lanes(engine, pool, host, options)
            return LaneSet([Faulty(each, fault, pool) for each in lanes.engines])

        monkeypatch.setattr(measuring_end, "open_lanes", faulty_lanes)

    return plant


def measured(end, *engines, shapes=SHAPES, **options):
    given = {"repeats": REPEATS, "verify": True, "pool_bytes": 1 << 20, "peer": "here"}
    return measure(end, engines, shapes, **given | options)


def pairs(rows):
    return [(each.shape, each.engine) for each in rows]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("open", "config_error", "not here"),
        ("connect", "peer_refused", "not today"),
        ("move", "peer_gone", "out of reach"),
        (
            "commit",
            "internal_error",
            "the end of a receive failed: ValueError('a bug of an engine')",
        ),
        ("bytes", "kv_corrupt", "tcp brought other bytes than were sent"),
    ],
)
@pytest.mark.parametrize("others", [("shm",), ("handover", "shm")], ids="-".join)
def test_an_engine_that_fails_is_named_and_the_others_have_their_figures(
    end, plant, fault, code, words, others
):
    plant("tcp", fault)
    report = measured(end, others[0], "tcp", *others[1:])
    assert pairs(report.figures) == [(str(shape), name) for shape in SHAPES for name in others]
    assert {each.num_verified for each in report.figures} == {REPEATS}
    assert pairs(report.failures) == [(str(shape), "tcp") for shape in SHAPES]
    assert {(each.code, each.message) for each in report.failures} == {(code, words)}


def test_the_words_of_what_is_missing_are_of_this_commands_flags(end):
    report = measured(end, "handover", "shm", shapes=SHAPES[:1], repeats=1)
    assert report.failures == []
    end.has_arena = False  # as between two hosts
    report = measured(end, "handover", "shm", shapes=SHAPES[:1], repeats=1)
    assert pairs(report.figures) == [("64KiB", "shm")]
    (failure,) = report.failures
    assert (failure.engine, failure.code) == ("handover", "config_error")
    assert "handover is for workers that" in failure.message
    assert "--transfer" not in failure.message


def test_when_the_other_end_is_gone_what_was_measured_is_told(end):
    def tell(words):
        if words == f"{SHAPES[1]}: 2 of {REPEATS}":
            end._link.close()

    report = measured(end, "tcp", "shm", tell=tell)
    assert pairs(report.figures) == [("64KiB", "tcp"), ("64KiB", "shm")]
    assert pairs(report.failures) == [("10x4KiB", "tcp"), ("10x4KiB", "shm")]
    assert {each.code for each in report.failures} == {"peer_gone"}


def test_memory_that_is_not_there_is_noticed_before_anything_is_measured(end):
    told = []
    with pytest.raises(ConfigError, match="too large"):
        measured(end, "shm", shapes=[*SHAPES, Shape.of("100000x1GiB")], tell=told.append)
    assert told == []


def test_engines_share_pools_where_they_can():
    assert _grouped(["shm", "nixl"], has_arena=True) == {"host": {0: "shm", 1: "nixl"}}
    assert _grouped(["nixl", "auto", "tcp", "cuda_ipc"], has_arena=True) == {
        "host": {0: "nixl"},
        "arena": {1: "auto", 2: "tcp"},
        "device": {3: "cuda_ipc"},
    }
    assert _grouped(["handover", "shm"], has_arena=False) == {"host": {0: "handover", 1: "shm"}}


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("fault", ["none", "bytes"])
def test_gpu_memory_is_verified_and_needs_no_room_of_the_host(end, plant, monkeypatch, fault):
    monkeypatch.setenv("NEURON_DI_CUDART", str(library_path()))
    plant("cuda_ipc", fault)
    report = measured(end, "shm", "cuda_ipc")
    done = report.figures if fault == "none" else report.failures
    assert pairs(done)[-1] == ("10x4KiB", "cuda_ipc")
    if fault == "none":
        assert pairs(done)[1] == ("64KiB", "cuda_ipc")
        assert {each.num_verified for each in done} == {REPEATS}
        assert all(each.of_memcpy > 0 for each in done)
    else:
        words = "cuda_ipc brought other bytes than were sent"
        assert {(each.code, each.message) for each in done} == {("kv_corrupt", words)}


def test_a_gpu_that_is_not_there_is_said_of_its_engine_only(end, monkeypatch):
    monkeypatch.setenv("NEURON_DI_CUDART", "/nowhere/libcudart.so")
    report = measured(end, "cuda_ipc", "shm", shapes=SHAPES[:1])
    assert pairs(report.figures) == [("64KiB", "shm")]
    (failure,) = report.failures
    assert failure.engine == "cuda_ipc"
    assert "config_error: KV in GPU memory needs the CUDA runtime" in failure.message
