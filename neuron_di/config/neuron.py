"""How a model is compiled for NeuronCores and run on them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from neuron_di.config.option import option
from neuron_di.errors import ConfigError

Runner = Literal["nxdi", "transformers-neuronx", "torch-neuronx"]

_BUCKETS_MAX = 32  # each is a graph of its own, compiled and loaded


def libnrt_option() -> Any:
    """Where the runtime is: the same key for whoever needs it."""
    return option(
        "file of the Neuron runtime library",
        default=None,
        default_text="libnrt.so.1, found by the linker or in /opt/aws/neuron/lib",
        form="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronOptions:
    """With --device neuron."""

    neuron_runner: Runner = option(
        "what runs the model: nxdi is NxD Inference; the others are refused with the reason",
        default="nxdi",
    )
    neuron_artifacts: str | None = option(
        "folder of compiled models, one for each configuration, or of one of them",
        default=None,
        default_text="neuron-di/artifacts in the user's cache",
        form="FOLDER",
    )
    neuron_k_transposed: bool = option(
        "keep keys transposed, dims before tokens, as some of NxD Inference's kernels want them",
        default=False,
    )
    neuron_decode_buckets: tuple[str, ...] = option(
        "lengths in tokens to which a decode step pads what it reads: short requests get faster "
        "steps, and rounding then depends on which requests share a step",
        default=(),
        default_text="the context alone",
        form="N",
    )
    libnrt: str | None = libnrt_option()

    def __post_init__(self) -> None:
        """ConfigError for buckets that are no ascending list of lengths."""
        lengths = self.decode_buckets
        is_ascending = all(a < b for a, b in pairwise((0, *lengths)))
        if len(lengths) > _BUCKETS_MAX or not is_ascending:
            raise ConfigError(
                f"--neuron-decode-buckets is a list of at most {_BUCKETS_MAX} ascending lengths, "
                "such as 512,2048",
                param="neuron_decode_buckets",
            )

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """The lengths as numbers. -1 stands for what is none."""
        return tuple(
            int(text) if text.isdecimal() and len(text) < 9 else -1
            for text in self.neuron_decode_buckets
        )
