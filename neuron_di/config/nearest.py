"""The valid name a mistyped one was most likely meant to be."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """The most similar of the valid names, of which there is at least one."""
    return difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.0)[0]
