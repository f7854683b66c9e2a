"""neuron-di: a disaggregated LLM server. Importing this loads no torch and no zmq."""

from typing import TYPE_CHECKING, Any

from neuron_di.version import __version__

if TYPE_CHECKING:
    from neuron_di.llm import LLM
    from neuron_di.wire import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the heavy names at their first use."""
    if name == "LLM":
        from neuron_di.llm import LLM

        return LLM
    if name == "SamplingParams":
        from neuron_di.wire import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
