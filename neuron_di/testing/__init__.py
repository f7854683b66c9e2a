"""The public test kit: what tests of this project, and of code that extends it, stand on.

    checkpoints      small models in Hugging Face layout
    virtual_loop     an asyncio loop on a virtual clock, with processes to kill and to freeze
    network          latency, partitions; sim_link and sim_legs run over it, with faults
    sim_link         the signal link in memory: SignalTransport
    fake_transfer    a TransferEngine with every way a copy can go wrong
    fake_model       a Backend whose tokens depend on each byte of KV
    swarm, sim       whole clusters, one seed each: `python -m neuron_di.testing.sim`

No server imports it. It may import everything but the commands.
"""

from neuron_di.testing.checkpoints import write_random_checkpoint

__all__ = ["write_random_checkpoint"]
