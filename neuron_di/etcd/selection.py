"""Which keys below a prefix are told of, where there may be many more of them than workers.

Whoever may write there can put any number of keys. What is no worker's record must not take the
place of one, and a record that was told of before goes before those that are new. Some of what is
no record is told of as well: whoever reads it says by name what is wrong with it.
"""

from collections.abc import Set as AbstractSet

from neuron_di.registry.embedded import KEYS_MAX
from neuron_di.registry.record_reader import is_record
from neuron_di.wire import RECORD_BYTES_MAX

JUNK_MAX = 1000
JUNK_BYTES_MAX = 4 << 20


class Selection:
    """Takes keys one by one, by their name: without the prefix.

    `known`: the records among them that were told of before. There are always places for them.
    """

    def __init__(self, known: AbstractSet[str] = frozenset()) -> None:
        self._known = known
        self._num_awaited = len(known)
        self._num_junk_bytes = 0
        self.records: dict[str, bytes] = {}
        self.junk: dict[str, bytes] = {}

    def values(self) -> dict[str, bytes]:
        """All that was taken."""
        return self.records | self.junk

    def take(self, name: str | None, value: bytes) -> bool:
        """Whether this key, which was not offered yet, is told of. None: it has no name."""
        is_known = name in self._known
        self._num_awaited -= is_known
        if name is None or len(value) > RECORD_BYTES_MAX:
            return False
        if not is_record(name, value):
            num_bytes = self._num_junk_bytes + len(name) + len(value)
            if len(self.junk) >= JUNK_MAX or num_bytes > JUNK_BYTES_MAX:
                return False
            self._num_junk_bytes = num_bytes
            self.junk[name] = value
            return True
        if not is_known and len(self.records) + self._num_awaited >= KEYS_MAX:
            return False
        self.records[name] = value
        return True

    def missing(self) -> list[str]:
        """Known keys that were not taken."""
        return [name for name in self._known if name not in self.records and name not in self.junk]
