"""Whether a file is another than it was when it was last looked at."""

from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """What differs when a file was changed, replaced or given to others."""

    changed_ns: int
    size: int
    inode: int
    mode: int


def look_at(path: Path) -> Seen | None:
    """Of what a symbolic link leads to. None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Seen(found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
