"""The version of this release, apart so that what is light need not import the package."""

__version__ = "0.1.0"
