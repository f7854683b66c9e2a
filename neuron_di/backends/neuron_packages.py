"""The packages that run a model on NeuronCores: which there are, and what to do without them."""

import importlib.metadata
import importlib.util
from pathlib import Path

from neuron_di.config import NeuronOptions
from neuron_di.errors import ConfigError
from neuron_di.neuron_releases import AWS_INDEX, INFERENCE_MIN, INFERENCE_MIN_SDK, numbers_of

# What decides what a compiled model computes.
_VERSIONED = (
    "neuronx-distributed-inference",
    "neuronx-distributed",
    "neuronx-cc",
    "torch-neuronx",
    "torch",
)
# Import names, and a part that only the real packages have.
_NXDI = {"neuronx_distributed_inference": "models", "torch_neuronx": ""}
_ABSENT = "absent"

# Runners that are not there: the import name of what they would stand on, and why they are not.
_OTHERS = {
    "transformers-neuronx": (
        "transformers_neuronx",
        "AWS has archived it, and only closed operators reach its KV",
    ),
    "torch-neuronx": (
        "torch_neuronx",
        "it compiles single functions, and nobody has written this project's models as such",
    ),
}


def require_packages(options: NeuronOptions) -> dict[str, str]:
    """Versions of what the runner stands on, by name. ConfigError where that is not installed."""
    if options.neuron_runner in _OTHERS:
        raise ConfigError(_why_not(options.neuron_runner), param="neuron_runner")
    missing = [name for name, part in _NXDI.items() if not _is_there(name, part)]
    if missing:
        raise ConfigError(
            f"--device neuron needs {' and '.join(missing)}: pip install "
            f"neuronx-distributed-inference torch-neuronx neuronx-cc --extra-index-url {AWS_INDEX} "
            "(PyPI's packages of these names are empty placeholders)"
        )
    versions = {name: _version(name) for name in _VERSIONED}
    inference = versions["neuronx-distributed-inference"]
    if () < numbers_of(inference) < INFERENCE_MIN:
        raise ConfigError(
            f"NxD Inference {inference} keeps no room behind a slot, so that a decode step would "
            "write into slots that wait: install neuronx-distributed-inference "
            f"{'.'.join(map(str, INFERENCE_MIN))} or newer, of Neuron SDK "
            f"{INFERENCE_MIN_SDK} on"
        )
    return versions


def _why_not(runner: str) -> str:
    module, reason = _OTHERS[runner]
    lacks = "" if _is_there(module) else f", and the package {runner} is not installed"
    return (
        f"--neuron-runner {runner} does not run models here: {reason}{lacks}. "
        "Use --neuron-runner nxdi, NxD Inference"
    )


def _is_there(module: str, part: str = "") -> bool:
    """Whether a package is installed, with this part. Imports nothing: who imports these packages
    has said before which cores are his."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    folders = spec.submodule_search_locations or ()
    return not part or any((Path(folder) / part).exists() for folder in folders)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT
