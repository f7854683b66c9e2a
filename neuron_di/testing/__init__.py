"""The public test kit: what tests of this project, and of code that extends it, stand on.

    checkpoints      small models in Hugging Face layout
    virtual_loop     an asyncio loop on a virtual clock, with processes to kill and to freeze
    network          latency, partitions; sim_link and sim_legs run over it, with faults
    sim_link         the signal link in memory: SignalTransport
    fake_transfer    a TransferEngine with every way a copy can go wrong
    fake_handover    a HandoverEngine on virtual time, and an arena of simulated processes
    fake_model       a Backend whose tokens depend on each byte of KV
    conformance      two OpenAI endpoints, compared field by field: `neuron-di conformance`
    swarm, sim       whole clusters, one seed each: `python -m neuron_di.testing.sim`

No server imports it. It may import everything but the commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_di.testing.checkpoints import write_random_checkpoint

__all__ = ["write_random_checkpoint"]


def __getattr__(name: str) -> Any:
    """Import what needs torch at its first use: a client of two servers needs none."""
    if name == "write_random_checkpoint":
        from neuron_di.testing.checkpoints import write_random_checkpoint

        return write_random_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
