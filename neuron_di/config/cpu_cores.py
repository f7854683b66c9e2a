"""How many CPU cores this process may keep busy."""

import os

from neuron_di.config.control_group import Read, core_quota, text_of


def usable_cores(read: Read = text_of) -> int:
    """The cores that this process may run on, or fewer where a control group grants less time.

    More threads than that only wait for each other: with a quota of two cores, as of a container,
    64 of them stand still for most of each period. At least 1.
    """
    cores, quota = len(os.sched_getaffinity(0)), core_quota(read)
    return cores if quota is None else max(1, min(cores, int(quota)))
