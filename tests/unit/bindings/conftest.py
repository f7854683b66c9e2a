"""Libraries for the tests of the libnrt bindings: each is a copy of the simulator of its own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nrt_sides import D, P, Side
from nrt_sim.build import library_path
from nrt_steering import Steering

from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    NrtLibrary,
    NrtRuntime,
    load_nrt,
)

_OF_THE_CALLER = (
    "NEURON_DI_LIBNRT",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    *(f"NRT_SIM_{name}" for name in ("INSTANCE", "HOST", "FAULTS", "TRACE", "HBM_BYTES", "STRICT")),
    *(f"NRT_SIM_{name}" for name in ("QUEUE_DEPTH", "PENDING_MAX", "COMMUNICATORS_MAX")),
)


@pytest.fixture
def simulated(monkeypatch) -> Iterator[Path]:
    """An environment with two cores of a trn1.32xlarge, below a root of its own."""
    for name in _OF_THE_CALLER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    with tempfile.TemporaryDirectory(prefix="nrt") as root:  # short: sockets are below it
        monkeypatch.setenv("NRT_SIM_ROOT", root)
        yield Path(root)


@pytest.fixture
def load(simulated: Path, tmp_path: Path) -> Iterator[Callable[[int], NrtLibrary]]:
    """Loads a library in the state of a fresh process. Nobody breaks its rules."""
    loaded: list[NrtLibrary] = []

    def load_api(api: int = 3) -> NrtLibrary:
        path = tmp_path / f"{len(loaded)}" / "libnrt.so.1"
        path.parent.mkdir()
        shutil.copyfile(library_path(api), path)
        loaded.append(load_nrt(str(path)))
        return loaded[-1]

    yield load_api
    for library in loaded:
        assert Steering(library).violation() == ""


@pytest.fixture
def library(load: Callable[[int], NrtLibrary]) -> NrtLibrary:
    return load(3)


@pytest.fixture
def runtime(library: NrtLibrary) -> Iterator[NrtRuntime]:
    """Started, with cores 0 and 1. Leaves nothing behind."""
    with NrtRuntime(library).init() as started:
        yield started
    assert Steering(library).num_live() == 0


@pytest.fixture
def sim(library: NrtLibrary) -> Steering:
    return Steering(library)


@pytest.fixture
def gates(simulated, monkeypatch):
    monkeypatch.setenv(ENABLED_VARIABLE, "1")
    monkeypatch.setenv(PORT_VARIABLE, "45645")


@pytest.fixture
def sides(gates, load, monkeypatch):
    """P's process has cores 0 and 1 of the host, D's 2 and 3."""
    made = []
    for cores in ("0,1", "2,3"):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
        made.append(Side(load(3)))
    made[0].both.open(P)
    made[1].both.open(D)
    yield made
    for side, lnc in zip(made, (P, D), strict=True):
        side.both.close(lnc)
        side.runtime.close()


@pytest.fixture
def memory(sides):
    sent = sides[0].runtime.allocate(4096, 0, "kv of P")
    received = sides[1].runtime.allocate(4096, 1, "kv of D")
    sent.write(0, np.arange(4096, dtype=np.uint32).astype(np.uint8))
    received.fill(0)
    return sent, received
