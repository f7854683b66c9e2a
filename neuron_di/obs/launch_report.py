"""How a child process tells its launcher where it stands: JSON lines on stdout.

Logs go to stderr and are for people; these lines are for `neuron-di serve`.
"""

import sys
from typing import Literal

import msgspec

from neuron_di.types import Role


class LaunchReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `loading` may repeat, `ready` or `failed` ends the start.

    `ready` comes again when a worker has changed its role; `drained` is the last word of one that
    ends by an operator's order. `unannounced` comes with why the registry does not have a worker,
    and without a message once it has.
    """

    event: Literal["loading", "ready", "failed", "drained", "unannounced"]
    done_bytes: int = 0
    total_bytes: int = 0
    url: str = ""
    registry: str = ""  # where workers announce themselves; the proxy's only
    etcd: tuple[str, ...] = ()  # or the etcd for that, where the proxy has started one
    worker_id: str = ""
    role: Role | None = None  # of a worker that is ready
    message: str = ""


def say(report: LaunchReport) -> None:
    """Print one line for the launcher. A launcher that is gone is no failure of the child's."""
    try:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass


def heard(line: bytes) -> LaunchReport | None:
    """Read a child's line; None for anything else that it printed."""
    try:
        return msgspec.json.decode(line, type=LaunchReport)
    except msgspec.DecodeError:
        return None
