"""A library of its own for each test, below a root of its own."""

from collections.abc import Callable, Iterator

import pytest
from nrt_sim.build import CannotBuild, library_path
from nrt_sim.plain import INVALID, PlainNrt

_OF_THE_CALLER = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
    "NRT_SIM_INSTANCE",
    "NRT_SIM_HOST",
    "NRT_SIM_FAULTS",
    "NRT_SIM_TRACE",
    "NRT_SIM_HBM_BYTES",
    "NRT_SIM_STRICT",
    "NRT_SIM_QUEUE_DEPTH",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
)


@pytest.fixture
def load(tmp_path, monkeypatch) -> Iterator[Callable[..., PlainNrt]]:
    """Makes libraries that are not open yet. A test leaves them closed, or its fault is shown."""
    for name in _OF_THE_CALLER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NRT_SIM_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    made: list[PlainNrt] = []

    def load(api: int = 3) -> PlainNrt:
        try:
            made.append(PlainNrt.copied(library_path(api), tmp_path))
        except CannotBuild as error:
            pytest.skip(str(error))
        return made[-1]

    yield load
    for library in made:
        if library.nrt_host_device_id_get(0, None) == INVALID:  # else it is not open
            library.nrt_close()


@pytest.fixture
def nrt(load) -> PlainNrt:
    """Open, with two cores of a trn1.32xlarge."""
    library = load()
    library.open()
    return library
