"""How many files and sockets this process may have open."""

import contextlib
import resource

from neuron_di.errors import ConfigError

DESCRIPTORS_MIN = 64  # that any process of ours needs before it serves anybody
_UNLIMITED = 1 << 31
_NOT_OF_CLIENTS = 256  # what a proxy has open beside its clients' connections


def raise_descriptor_limit() -> int:
    """As many as an operator allows: as a rule a process begins with 1,024, and may have more.

    Returns how many these are. ConfigError where they are too few for any process.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that has a limit of its own below
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    if limit < DESCRIPTORS_MIN:
        raise ConfigError(
            f"a process may have {limit} files and sockets open here, and this one needs at least "
            f"{DESCRIPTORS_MIN}: raise the limit nofile (ulimit -n)"
        )
    return limit


def connections_within(limit: int, wanted: int) -> int:
    """How many of the wanted connections a proxy can hold that may have `limit` descriptors."""
    return min(wanted, limit - min(_NOT_OF_CLIENTS, limit // 2))
