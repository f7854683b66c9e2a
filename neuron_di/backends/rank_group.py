"""What the ranks of one worker pass to each other while they compute: gloo, over loopback.

They find each other through a file in memory that only they have open. gloo itself asks no key of
whoever connects to it, so it listens on loopback only.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

# Not `init_process_group`: one group for the whole process, on an interface that a variable names.
_Gloo: Any = torch.distributed.ProcessGroupGloo
_FileStore: Any = torch.distributed.FileStore  # type: ignore[attr-defined]
_LOOPBACK = "127.0.0.1"


class RankGroup:
    """One rank's end. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, num_ranks: int, rendezvous_fd: int, timeout_s: float) -> None:
        """Connect to the others. RuntimeError where one is not there in time, as in `gather`."""
        options = _Gloo._Options()  # noqa: SLF001 - torch has no public name for them
        options._devices = [_Gloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        self._num_ranks = num_ranks
        # The store opens its file by number, now and when it is freed: the number stays ours.
        self._fd = os.dup(rendezvous_fd)
        try:
            store = _FileStore(f"/proc/self/fd/{self._fd}", num_ranks)
            self._gloo: Any = _Gloo(store, rank, num_ranks, options)
        except BaseException:
            store = None
            os.close(self._fd)
            raise

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of the ranks; they are of one shape and dtype."""
        x = x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(self._num_ranks)]
        # As bytes: gloo does not know every dtype.
        as_bytes = [each.view(torch.uint8) for each in gathered]
        assert self._gloo is not None, "the group is closed"
        self._gloo.allgather([as_bytes], [x.view(torch.uint8)]).wait()
        return gathered

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        if self._gloo is not None:
            self._gloo = None  # and the store, which nobody else has
            os.close(self._fd)
