import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
for name in (".", "neuron_stand_in", "unit/backends"):
    if str(TESTS / name) not in sys.path:
        sys.path.append(str(TESTS / name))

from nrt_sim.build import CannotBuild, library_path  # noqa: E402
from stand_in import cores  # noqa: E402
from stand_in_kit import compile_model  # noqa: E402

from neuron_di.testing import write_random_checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def tales_folder() -> Path:
    """The shipped model: 4 heads, 2 KV heads."""
    return TESTS.parent / "examples/models/tiny-tales"


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of each family that needs no sliding window. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    write_random_checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of them: 3 layers, 4 heads, 2 KV heads. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen2"
    write_random_checkpoint(folder, "qwen2")
    return folder


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A simulated instance. Call it to say how many cores this process gets, and more variables."""
    try:
        library = library_path()
    except CannotBuild as error:
        pytest.skip(str(error))
    monkeypatch.setenv("NEURON_DI_LIBNRT", str(library))
    monkeypatch.setenv("NRT_SIM_ROOT", str(tmp_path / "sim"))
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    for variable in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(variable, raising=False)

    def choose(num_cores: int | None = 4, **variables: str) -> None:
        if num_cores is not None:
            monkeypatch.setenv("NEURON_RT_NUM_CORES", str(num_cores))
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)

    choose()
    steering = ctypes.CDLL(str(library))
    steering.nrt_sim_forget_violations()
    yield choose
    steering.nrt_sim_clear_faults()
    cores.shut_down()
    assert steering.nrt_sim_violations() == 0


@pytest.fixture
def make_model(device: object, tmp_path: Path) -> Callable[..., Any]:
    """Compile a model with these arguments of NeuronConfig and load it, without a warm-up."""

    def make(folder: Path, **arguments: Any) -> Any:
        model = compile_model(folder, tmp_path / "compiled", **arguments)
        model.load(str(tmp_path / "compiled"), skip_warmup=True)
        return model

    return make
