from pathlib import Path

import pytest
from backend_kit import opened

from neuron_di.backends import BackendOptions, open_backend
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec
from neuron_di.types import Incarnation


@pytest.mark.parametrize("device", ["cuda", "neuron", ""])
def test_other_devices_are_refused_by_name(llama_folder: Path, device: str) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    options = BackendOptions(
        folder=llama_folder,
        spec=spec,
        layout=spec.kv_layout(block_size=16, dtype="float32"),
        num_blocks=1,
        incarnation=Incarnation("a" * 32),
        num_threads=1,
    )
    with pytest.raises(ConfigError, match=f"device '{device}' is not available.*cpu"):
        open_backend(device, options)


def test_cpu_opens_with_the_layout_it_was_told(llama_folder: Path) -> None:
    with opened(llama_folder, num_blocks=7, dtype="bfloat16") as backend:
        assert backend.layout.dtype == "bfloat16"
        assert backend.pool.tensor().shape == (7, *backend.layout.rank_shape)
        assert backend.num_vocab == 2048
