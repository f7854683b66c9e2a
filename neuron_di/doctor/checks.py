"""Every check, in the order in which an operator reads what they find.

A check is a function `check(machine, options) -> Iterator[Finding]` in a module of its own, which
is loaded when the check runs. It does not raise for what a machine may be. `timeout_s` is far
beyond what it takes: after it the check counts as failed, and the next one runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from neuron_di.config import DoctorOptions
from neuron_di.config.nearest import nearest
from neuron_di.errors import ConfigError

if TYPE_CHECKING:  # each command of ours loads this file
    from neuron_di.doctor.finding import Finding
    from neuron_di.doctor.machine import Machine

CheckFunction = Callable[["Machine", DoctorOptions], Iterator["Finding"]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: all its findings are of `group`, its function is in `module` of this package."""

    group: str
    module: str
    timeout_s: float

    def function(self) -> CheckFunction:
        """Loads the module."""
        loaded = import_module(f"neuron_di.doctor.{self.module}")
        return cast("CheckFunction", loaded.check)


CHECKS = (
    Check("host", "host", 10),
    Check("packages", "packages", 20),
    Check("environment", "environment", 10),
    Check("ports", "ports", 20),
    Check("peers", "peers", 20),
    Check("clock", "clock", 10),
    Check("etcd", "etcd_check", 40),
    Check("cpu", "cpu", 20),
    Check("cuda", "cuda", 60),
    Check("neuron", "neuron_devices", 60),
    Check("neuron", "neuron_software", 60),
    Check("neuron", "neuron_compiler", 60),
    Check("neuron", "neuron_variables", 10),
    Check("neuron", "neuron_memory", 120),
    Check("efa", "efa", 30),
    Check("transfer", "transfer_check", 60),
)

GROUPS = tuple(dict.fromkeys(check.group for check in CHECKS))

# What is not looked at where --device names another kind.
_GROUPS_OF_DEVICES = {"cuda", "neuron"}


def chosen(options: DoctorOptions) -> list[Check]:
    """The checks of the groups that `--only` names, all without it. ConfigError for others."""
    for name in options.only:
        if name not in GROUPS:
            raise ConfigError(
                f"--only: there is no group {name!r}; the nearest is {nearest(name, GROUPS)!r} of "
                f"{', '.join(GROUPS)}",
                param="only",
            )
    named = set(options.only)
    if named and options.device != "auto":
        left = named - (_GROUPS_OF_DEVICES - {options.device})
        if not left:
            raise ConfigError(
                f"--device {options.device} leaves out all of --only {','.join(options.only)}",
                param="only",
            )
    return [check for check in CHECKS if not options.only or check.group in options.only]
