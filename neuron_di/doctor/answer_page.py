"""One answer that the checks of a run share, though each runs in a process of its own.

A library that hangs costs its whole deadline each time that it is asked. The first check that finds
out leaves here what it got, and the others take it from here.
"""

import mmap

_ROOM_BYTES = 1 << 16
_LENGTH_BYTES = 4


class AnswerPage:
    """Memory that a process and those that it forks have in common. Checks run one at a time."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ROOM_BYTES)  # shared with forks, and gone with the last one

    def write(self, text: str) -> None:
        """Leave it. What is larger than the page is not left."""
        data = text.encode()
        if len(data) > _ROOM_BYTES - _LENGTH_BYTES:
            return
        self._memory[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        self._memory[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES)

    def read(self) -> str:
        """What was left; empty where nothing was."""
        num_bytes = int.from_bytes(self._memory[:_LENGTH_BYTES])
        return self._memory[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].decode()
