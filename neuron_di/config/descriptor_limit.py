"""How many files and sockets this process may have open."""

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """As many as an operator allows: as a rule a process begins with 1,024, and may have more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that has a limit of its own below
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
