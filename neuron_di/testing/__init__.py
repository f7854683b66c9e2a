"""The public test kit: what tests of this project, and of code that extends it, stand on."""

from neuron_di.testing.checkpoints import write_random_checkpoint

__all__ = ["write_random_checkpoint"]
