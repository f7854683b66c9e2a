from pathlib import Path

import pytest

from neuron_di.testing import write_random_checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="session", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each family in turn. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    write_random_checkpoint(folder, request.param)
    return folder


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A tiny checkpoint to damage."""
    folder = tmp_path / "llama"
    write_random_checkpoint(folder, "llama")
    return folder
