"""What a directory of workers may be able to do beside saying who is known (`route.Directory`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from neuron_di.registry import RefusedRecord
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.workers import Process

LastWord = Callable[[WorkerRecord], WorkerStatus | None]


@runtime_checkable
class AskingDirectory(Protocol):
    """One that asks workers for their records."""

    def ask_first(self, last_word: LastWord) -> None:
        """What `last_word` has need not be asked for."""


@runtime_checkable
class TellingDirectory(Protocol):
    """One that tells of its changes. `epoch` counts them."""

    epoch: int

    async def wait_changed(self, epoch: int) -> int:
        """Wait until the view is newer than `epoch`. Returns its epoch."""


@runtime_checkable
class DoubtingDirectory(Protocol):
    """One that keeps workers whose key vanished until it hears that they are gone."""

    def vanished(self) -> Mapping[Process, float]:
        """Those of them that it has, and for how many seconds."""

    def drop(self, record: WorkerRecord, reason: str) -> None:
        """This process is gone. Nothing happens where its key has not vanished."""


@runtime_checkable
class AdoptingDirectory(Protocol):
    """One that takes a worker's own word for itself while it hears nothing of it otherwise."""

    def adopt(self, lost: WorkerRecord, successor: WorkerRecord) -> bool:
        """At the address of a process that is lost another answers: put it in its place.

        False where it cannot be the same worker after a restart, or the registry will say.
        """


@runtime_checkable
class CandidDirectory(Protocol):
    """One that says what is wrong with it, and whom it leaves out."""

    def trouble(self) -> str:
        """Why the view may be old; empty while all is well."""

    def refused(self) -> Sequence[RefusedRecord]:
        """Who is left out and why."""

    def num_ignored_by_fault(self) -> Mapping[str, int]:
        """How many keys were left out since the start, by what was wrong with them."""


@runtime_checkable
class NamedDirectory(Protocol):
    """One whose workers the operator named, so that one which is not there is missed."""

    def missing(self) -> Sequence[str]:
        """A sentence for each of those: why it is not there, and not where it should be."""
