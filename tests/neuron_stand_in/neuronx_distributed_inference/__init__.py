"""A stand-in for AWS's package of this name: see `stand_in`. Built from public documentation."""

__version__ = "0.0+stand.in"
