"""Engines on one tiny checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Rig

from neuron_di.testing import write_random_checkpoint


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    write_random_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def make_rig(llama_folder: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(role: str, **options: Any) -> Rig:
        rigs.append(Rig(llama_folder, role, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.backend.close()
