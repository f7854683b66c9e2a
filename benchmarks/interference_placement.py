"""Which core runs what, so that decode has its own and only the workers compete for theirs."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

_BACKGROUND_NICE = 10


@dataclass(frozen=True, slots=True)
class Placement:
    """Cores of the workers (as `--pin` gives them out), and the one of client and proxy."""

    worker_cores: dict[str, int]
    client_core: int

    @property
    def yielding(self) -> list[str]:
        """The workers that share the client's core, and give way to it."""
        return [name for name, core in self.worker_cores.items() if core == self.client_core]

    @classmethod
    def of(cls, workers: list[str], cores: list[int]) -> "Placement":
        """Client and proxy get a core without a worker, else the first worker's.

        ValueError with one core: then nothing can be kept apart.
        """
        if len(cores) < 2:
            raise ValueError("two cores are needed to keep decode apart from the rest")
        worker_cores = {name: cores[i % len(cores)] for i, name in enumerate(workers)}
        spare = [core for core in cores if core not in worker_cores.values()]
        return cls(worker_cores, spare[-1] if spare else worker_cores[workers[0]])

    def __str__(self) -> str:
        parts = [f"{name} on core {core}" for name, core in self.worker_cores.items()]
        parts.append(f"client and proxy on core {self.client_core}")
        if self.yielding:
            parts.append(f"{', '.join(self.yielding)} gives way to them (nice {_BACKGROUND_NICE})")
        return ", ".join(parts)


@contextlib.contextmanager
def placed(placement: Placement, pids: Mapping[str, int]) -> Iterator[None]:
    """Move this process and the proxy to their core for as long as this is entered."""
    own_cores = os.sched_getaffinity(0)
    for thread_id in [*_threads(os.getpid()), *_threads(pids["proxy"])]:
        os.sched_setaffinity(thread_id, {placement.client_core})
    for name in placement.yielding:
        for thread_id in _threads(pids[name]):
            os.setpriority(os.PRIO_PROCESS, thread_id, _BACKGROUND_NICE)
    try:
        yield
    finally:
        for thread_id in _threads(os.getpid()):
            os.sched_setaffinity(thread_id, own_cores)


def _threads(pid: int) -> list[int]:
    """Linux keeps affinity and priority by thread."""
    return [thread.id for thread in psutil.Process(pid).threads()]
