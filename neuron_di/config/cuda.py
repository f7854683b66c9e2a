"""How a model runs on NVIDIA GPUs."""

from dataclasses import dataclass

from neuron_di.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """With --device cuda."""

    cuda_devices: tuple[str, ...] = option(
        "numbers of the GPUs to use, as CUDA has them: workers take turns, and may share one",
        default=(),
        default_text="all that CUDA_VISIBLE_DEVICES leaves",
        form="N",
    )
    cuda_share: int = option(
        "workers that divide the GPU's free memory, this one included",
        default=1,
        at_least=1,
        at_most=64,
        hidden=True,
    )
    cuda_graphs: bool = option(
        "capture decode steps as CUDA graphs, one for each of a few batch sizes", default=True
    )
    batch_invariant: bool = option(
        "compute each row of a step in one order, whatever shares the step: slower, and an answer "
        "that a failure cuts off is then continued bit for bit",
        default=False,
    )
