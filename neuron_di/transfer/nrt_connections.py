"""The device's connections to its peers: made once for a pair of processes, used again, counted.

The runtime has so many communicators per core and cannot give one back. So those of a peer that
links anew are used again, where both ends still have them; those of a peer that is gone are lost,
and who needs more than there are gets an error that says so.
"""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from neuron_di.clock import Deadline, sleep_s
from neuron_di.errors import PeerGone, PeerRefused, PeerTimeout
from neuron_di.transfer.nrt_channel import Channel, is_late
from neuron_di.transfer.nrt_driver import Communicator, Driver, Probe
from neuron_di.types import Incarnation
from neuron_di_bindings.nrt import (
    NrtError,
    NrtRetry,
    NrtStatus,
    NrtWorkerError,
)

Direction = Literal["send", "receive"]
# Of each pair: the rank here, the core there.
Pairs = Sequence[tuple[int, int]]

PROBE_BYTES = 32
_POLL_S = 0.002
_SPENT_SETS_MAX = 8  # of one pair of processes: who says each time that it has none takes no more
_EPOCH_BITS = 63  # 0 is none


@dataclass(eq=False, slots=True)
class Place:
    """One pair of cores: which rank here, which core there, and where its probe lies.

    It has a channel once the whole set is connected, perhaps the same one as others of the set.
    """

    rank: int
    lnc: int
    peer_lnc: int
    probe_offset: int
    communicator: Communicator | None = None
    channel: Channel | None = None


@dataclass(eq=False, slots=True)
class ConnectionSet:
    """All communicators between this process and a peer's, in one direction, by pairs of ranks.

    `epoch` is the same at both ends.
    """

    peer: Incarnation
    direction: Direction
    host: str
    epoch: int
    places: list[Place] = field(default_factory=list)
    is_used: bool = False  # by a link that there is
    is_broken: bool = False  # its order is not known any more, or something is posted for good
    is_connecting: bool = False  # a thread waits for it
    num_spent: int = 0  # communicators of the same pair of processes that nobody uses any more

    def serves(self, host: str, pairs: Pairs) -> bool:
        """Whether a link to these cores of that host can use it again."""
        own = [(place.rank, place.peer_lnc) for place in self.places]
        return not self.is_broken and self.host == host and own == list(pairs)

    @property
    def channels(self) -> list[Channel]:
        """Each once."""
        found = (place.channel for place in self.places if place.channel is not None)
        return list(dict.fromkeys(found))


class Connections:
    """Borrows the driver, whose cores are `lncs`, by ranks.

    Thread-safe, but two threads do not connect one peer at once.
    """

    def __init__(self, driver: Driver, lncs: Sequence[int]) -> None:
        self._driver = driver
        self._lncs = lncs
        self._lock = threading.Lock()
        self._sets: dict[tuple[Incarnation, Direction], ConnectionSet] = {}
        self._num_made = driver.num_made
        # Not begun, or not met by the peer: whatever process comes to be there meets these.
        self._unmet: dict[tuple[Direction, str, int, int], Place] = {}

    def epoch_of(self, peer: Incarnation, direction: Direction, host: str, pairs: Pairs) -> int:
        """Of the connections to a peer that can be used again for these pairs; 0: there are
        none."""
        with self._lock:
            known = self._sets.get((peer, direction))
            return known.epoch if known is not None and known.serves(host, pairs) else 0

    def agree(
        self, peer: Incarnation, direction: Direction, host: str, pairs: Pairs, its_epoch: int
    ) -> int:
        """The epoch to use with a peer that has `its_epoch`: that, if this end has it, too."""
        own = self.epoch_of(peer, direction, host, pairs)
        if own and own == its_epoch:
            return own
        return secrets.randbits(_EPOCH_BITS) | 1

    def take(
        self,
        peer: Incarnation,
        direction: Direction,
        host: str,
        epoch: int,
        pairs: Pairs,
    ) -> ConnectionSet:
        """The set of this epoch: the one that is there, or places for one. PeerRefused where a core
        has no communicators left for it, or the peer has wasted too many."""
        with self._lock:
            known = self._sets.get((peer, direction))
            made = ConnectionSet(peer, direction, host, epoch)
            if known is not None:
                if known.epoch == epoch and known.serves(host, pairs):
                    return known
                self._spend(known)
                made.num_spent = known.num_spent
                if made.num_spent > _SPENT_SETS_MAX * len(pairs):
                    raise PeerRefused("it has given up too many of the device's connections")
            keys = [(direction, host, peer_lnc, self._lncs[rank]) for rank, peer_lnc in pairs]
            self._give_up_unmet(set(keys))
            for lnc, count in Counter(key[3] for key in keys if key not in self._unmet).items():
                if self._num_made[lnc] + count > self._driver.limits.communicators_max:
                    raise PeerRefused(self._why_full(lnc))
            for (rank, peer_lnc), key in zip(pairs, keys, strict=True):
                place = self._unmet.pop(key, None) or self._new_place(rank, peer_lnc)
                made.places.append(place)
            self._sets[peer, direction] = made
            return made

    def connect(
        self, wanted: ConnectionSet, deadline: Deadline, is_over: Callable[[], bool]
    ) -> None:
        """Make what is not there yet, and wait until the peer has done so, too. Blocks.

        PeerTimeout by the deadline, PeerGone once `is_over` says so: what was begun goes on, and
        another call may find it connected. PeerRefused or PeerGone where the runtime makes none.
        """
        with self._lock:
            if wanted.is_broken:
                raise PeerGone("another process has its cores")
            wanted.is_connecting = True
        begun: list[Communicator] = []
        begin = self._driver.connect if wanted.direction == "send" else self._driver.accept
        try:
            for place in wanted.places:
                if place.communicator is None:
                    place.communicator = begin(wanted.host, place.peer_lnc, place.lnc)
                begun.append(place.communicator)
            for communicator in begun:
                while not _is_connected(communicator):
                    if deadline.has_passed():
                        raise PeerTimeout("its device's connections are not there in time")
                    if is_over():
                        raise PeerGone("it gave up while the devices were being connected")
                    sleep_s(_POLL_S)
            if not wanted.channels:
                channels = self._driver.channels(begun)
                for place, channel in zip(wanted.places, channels, strict=True):
                    place.channel = channel
        except NrtError as error:
            with self._lock:
                self._spend(wanted)
            if isinstance(error, NrtWorkerError):
                raise
            if error.status == NrtStatus.RESOURCE:
                raise PeerRefused(f"the device makes no more connections: {error}") from None
            raise PeerGone(f"its device cannot be connected: {error}") from None
        finally:
            wanted.is_connecting = False

    def probe_of(self, place: Place) -> Probe:
        """Where a place's proof lies, at its `probe_offset`."""
        return self._driver.probes[place.rank]

    def _new_place(self, rank: int, peer_lnc: int) -> Place:
        """Under the lock."""
        lnc = self._lncs[rank]
        offset = self._num_made[lnc] * PROBE_BYTES
        self._num_made[lnc] += 1
        return Place(rank, lnc, peer_lnc, offset)

    def _give_up_unmet(self, keys: set[tuple[Direction, str, int, int]]) -> None:
        """Under the lock: what was begun with a process that is gone meets the one there now."""
        for known in self._sets.values():
            own = {(known.direction, known.host, each.peer_lnc, each.lnc) for each in known.places}
            is_idle = not known.is_used and not known.is_connecting
            if is_idle and not known.channels and own & keys:
                self._spend(known)

    def _why_full(self, lnc: int) -> str:
        used = (place for each in self._sets.values() if each.is_used for place in each.places)
        num_used = sum(place.lnc == lnc for place in used)
        return (
            f"core {lnc} has too few communicators left: {self._num_made[lnc]} of "
            f"{self._driver.limits.communicators_max} were made, of which {num_used} are in use; "
            "those of peers that are gone come back with a restart of this worker"
        )

    def _spend(self, known: ConnectionSet) -> None:
        """Under the lock: nobody uses it again, but for what the peer never met."""
        known.is_broken = True
        places, known.places = known.places, []
        for place in places:
            if place.communicator is not None and place.communicator.was_connected:
                known.num_spent += 1
            else:
                key = known.direction, known.host, place.peer_lnc, place.lnc
                self._unmet[key] = place


def _is_connected(communicator: Communicator) -> bool:
    try:
        return communicator.is_connected()
    except NrtRetry:
        return False
    except NrtError as error:
        if is_late(error):
            return False
        raise
