"""Whether etcd can be used as workers and proxies use it: each member, then a write and a lease.

What is written is a key below the options' prefix, under a lease of its own, gone at the end.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

from neuron_di.config import DoctorOptions, EtcdOptions
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine
from neuron_di.errors import ConfigError, NeuronDiError

if TYPE_CHECKING:  # gRPC is loaded where --etcd is given
    from neuron_di.etcd.security import Security

_VERSION_TIMEOUT_S = 5.0
_OTHERS_MAY_READ = 0o077
_INSTALL = "Install etcd (Debian and Ubuntu: apt-get install etcd-server), or name one with --etcd."


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Skipped without --etcd. With `auto` an etcd of our own is started, tried and ended."""
    if not options.etcd.etcd:
        yield Finding.skipped("etcd.member", "no --etcd was given; on one machine none is needed")
        return
    try:
        from neuron_di.doctor.etcd_probe import probe_members  # loads its packages
        from neuron_di.etcd.security import security_of

        security = security_of(options.etcd)
    except ConfigError as error:
        yield Finding.failed(
            "etcd.options",
            error.message,
            "Correct the file that it names, or install the packages.",
        )
        return
    yield from _secrets(options.etcd)
    if options.etcd.is_auto:
        yield from _auto(machine, options.etcd, security)
    else:
        yield from _as_they_come(probe_members(options.etcd, security))


def _as_they_come(findings: AsyncGenerator[Finding]) -> Iterator[Finding]:
    """What was found is told also where what follows hangs, or fails."""

    async def following() -> Finding | None:
        return await anext(findings, None)

    with asyncio.Runner() as runner:
        try:
            while (finding := runner.run(following())) is not None:
                yield finding
        finally:
            runner.run(findings.aclose())


def _secrets(options: EtcdOptions) -> Iterator[Finding]:
    """Who else may read a password, or a key."""
    for flag, path in (
        ("--etcd-password-file", options.etcd_password_file),
        ("--etcd-key", options.etcd_key),
    ):
        if path is not None and os.stat(path).st_mode & _OTHERS_MAY_READ:
            yield Finding.warning(
                "etcd.secret",
                f"other users of this machine may read the file of {flag}",
                "chmod 600, for the user that the server runs as.",
                facts={"flag": flag},
            )
    if options.shows_password:
        yield Finding.warning(
            "etcd.secret",
            "the password for etcd crosses the network in the clear",
            "Give --etcd-ca, of an etcd that speaks TLS.",
        )


def _auto(machine: Machine, options: EtcdOptions, security: "Security") -> Iterator[Finding]:
    ran = machine.run("etcd", "--version", timeout_s=_VERSION_TIMEOUT_S)
    found = re.search(r"etcd Version: (\S+)", ran.stdout) if ran is not None else None
    if found is None:
        says = "there is no program etcd, which --etcd auto starts"
        if ran is not None:
            says = "the program etcd does not say its version"
        yield Finding.failed("etcd.program", says, _INSTALL)
        return
    yield Finding.ok(
        "etcd.program", f"the program etcd is version {found[1]}", facts={"version": found[1]}
    )
    try:
        yield from _as_they_come(_started(options, security))
    except (NeuronDiError, OSError) as error:
        words = error.message if isinstance(error, NeuronDiError) else str(error)
        yield Finding.failed(
            "etcd.program",
            f"an etcd of our own does not start: {words}",
            "It needs the loopback interface (ip link set lo up), some tens of open files "
            "(ulimit -n) and room in TMPDIR.",
        )


async def _started(options: EtcdOptions, security: "Security") -> AsyncGenerator[Finding]:
    from neuron_di.doctor.etcd_probe import probe_members
    from neuron_di.etcd.child import ChildEtcd

    async with ChildEtcd() as child:
        own = EtcdOptions(etcd=(child.address,), etcd_prefix=options.etcd_prefix)
        async for finding in probe_members(own, security):
            yield finding
