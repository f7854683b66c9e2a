"""A file of API keys, as a test wants it."""

from collections.abc import Mapping
from pathlib import Path

from neuron_di_proxy.key_file import KeyRecord, changing_key_file


def write_key_file(path: Path, wanted: Mapping[str, KeyRecord]) -> None:
    """Whatever it had before."""
    with changing_key_file(path, may_be_new=True) as keys:
        keys.clear()
        keys.update(wanted)
