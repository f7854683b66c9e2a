"""Which NVIDIA GPU each worker of `neuron-di serve` gets.

A GPU can serve several processes, so there may be more workers than GPUs. Numbers are CUDA's: of
the devices that CUDA_VISIBLE_DEVICES leaves, from 0.
"""

from collections.abc import Mapping, Sequence

from neuron_di.errors import ConfigError
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE, CudaError, CudaMissing, load_cuda


def count_devices() -> int:
    """How many GPUs this process may use. ConfigError where there is none, or nobody can tell.

    Takes no memory on any of them.
    """
    try:
        num_devices = load_cuda().num_devices()
    except (CudaMissing, CudaError) as error:
        raise ConfigError(
            f"--device cuda needs an NVIDIA GPU and the CUDA runtime, 12.0 or newer: {error}. "
            "Mend: pip install '.[cuda]' in neuron-di's folder, or name its file in "
            f"{PATH_VARIABLE}; nvidia-smi says whether the driver works; --device cpu needs neither"
        ) from None
    if num_devices == 0:
        raise ConfigError(
            "--device cuda: no NVIDIA GPU is visible. Mend: CUDA_VISIBLE_DEVICES says which are"
        )
    return num_devices


def share_devices(
    wanted: Sequence[str], num_devices: int, workers: Sequence[str]
) -> Mapping[str, int]:
    """A GPU for each worker, in turn: of those that are `wanted`, or of all.

    ConfigError for what is no GPU of this machine.
    """
    numbers = [_number(text, num_devices) for text in wanted] or list(range(num_devices))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--cuda-devices {','.join(wanted)} names a GPU twice", param="cuda_devices"
        )
    return {name: numbers[place % len(numbers)] for place, name in enumerate(workers)}


def _number(text: str, num_devices: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < num_devices):
        shown = "GPU 0" if num_devices == 1 else f"GPUs 0 to {num_devices - 1}"
        raise ConfigError(
            f"--cuda-devices {text}: this machine shows {shown}, in the order of "
            "CUDA_VISIBLE_DEVICES",
            param="cuda_devices",
        )
    return int(text)
