"""A stand-in for AWS's package of this name: see `stand_in`. Built from public documentation."""

from stand_in.closed_classes import install

from torch_neuronx import utils

__all__ = ["utils"]
__version__ = "0.0+stand.in"

install()
