"""What befalls etcd while requests run. Rows F25 to F33 of the matrix of faults: all N, no effect.

F29 and F30 are the rows where a worker is gone and a proxy is told that it is there: what ran on it
goes on elsewhere.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from etcd.etcd_kit import Etcd, running_etcd

from neuron_di.clock import unix_s
from neuron_di.types import Role

from .events import Stage, pause

TTL_S = 2.0  # of a worker's key, as the settings of these runs have it
QUOTA_BYTES = 2_000_000
TOKEN_TTL_S = 1

Strike = Callable[[Stage, float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdFault:
    """`strike` is given the stage, and for how many seconds the fault lasts at least.

    With `has_users` etcd has three members that ask who one is, else it is one. `sign` is an event
    that a proxy or worker logs where the fault befalls it: without it nothing was tried. Where it
    is empty nothing shows in a log.
    """

    name: str
    title: str
    strike: Strike
    sign: str = ""
    lasts_s: float = 0.0
    has_users: bool = False


@contextlib.asynccontextmanager
async def etcd_for(*, has_users: bool) -> AsyncIterator[Etcd]:
    """The etcd that a fault needs."""
    flags = [f"--auth-token-ttl={TOKEN_TTL_S}"] if has_users else []
    flags.append(f"--quota-backend-bytes={QUOTA_BYTES}")
    async with running_etcd(num_members=3 if has_users else 1, flags=flags) as etcd:
        if has_users:
            etcd.enable_users()
        yield etcd


async def killed(stage: Stage, lasts_s: float) -> None:
    """And a worker dies meanwhile. Its lease begins anew with etcd: it is a ghost for a TTL."""
    (etcd,) = stage.cluster.etcd.members
    etcd.kill()
    await pause(lasts_s / 2)
    await stage.kill(_a_decode_worker(stage))
    await pause(lasts_s / 2)
    etcd.launch()
    await stage.cluster.etcd.answers()


async def frozen(stage: Stage, lasts_s: float) -> None:
    (etcd,) = stage.cluster.etcd.members
    etcd.freeze()
    try:
        await pause(lasts_s)
    finally:
        etcd.thaw()


async def wiped(stage: Stage, _: float) -> None:
    await stage.cluster.etcd.restart(wiped=True)


async def deletion_lost(stage: Stage, lasts_s: float) -> None:
    """One proxy hears nothing, a worker dies and vanishes, and history is compacted behind it."""
    cluster = stage.cluster
    cluster.between.block("down")
    await stage.kill(_a_decode_worker(stage))
    await pause(lasts_s)
    revision = json.loads(cluster.etcd.ctl("get", "/", "--write-out=json"))["header"]["revision"]
    cluster.etcd.ctl("compaction", str(revision))
    cluster.between.reset()
    cluster.between.heal()


async def leader_killed(stage: Stage, lasts_s: float) -> None:
    """It is the member that proxies and workers have talked to: the first one that they know."""
    etcd = stage.cluster.etcd
    leader = etcd.members[0]
    while await etcd.leader() is not leader:
        lines = etcd.ctl("endpoint", "status", "--write-out=simple").splitlines()
        (member_id,) = (each.split(", ")[1] for each in lines if f":{leader.port}, " in each)
        # On a busy machine it may be that nobody leads at this moment.
        etcd.ctl("move-leader", member_id, check=False)
        await pause(0.1)
    leader.kill()
    await pause(lasts_s)
    leader.launch()


async def tokens_expired(stage: Stage, lasts_s: float) -> None:
    """Nobody can use what it has, and all of them need one at the same time."""
    members = stage.cluster.etcd.members
    for member in members:
        member.freeze()
    try:
        await pause(lasts_s)
    finally:
        for member in members:
            member.thaw()


async def leases_lost(stage: Stage, _: float) -> None:
    for lease in _leases(stage.cluster.etcd):
        stage.cluster.etcd.ctl("lease", "revoke", lease)


async def disk_full(stage: Stage, lasts_s: float) -> None:
    """Leases are kept alive all the same. Then an operator does what etcd's guide says."""
    etcd = stage.cluster.etcd
    said = ""
    while "space exceeded" not in said:
        value = "x" * 100_000
        said = await asyncio.to_thread(etcd.ctl, "put", "/else/full", value, check=False)
    await pause(lasts_s)
    etcd.ctl("del", "--prefix", "/else/")
    revision = json.loads(etcd.ctl("get", "/", "--write-out=json"))["header"]["revision"]
    etcd.ctl("compaction", str(revision))
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")


def _a_decode_worker(stage: Stage) -> str:
    return next(each.name for each in stage.cluster.here() if each.role == "decode")


def _leases(etcd: Etcd) -> list[str]:
    return etcd.ctl("lease", "list").split("\n")[1:-1]


FAULTS: Mapping[str, EtcdFault] = {
    fault.name: fault
    for fault in (
        EtcdFault(
            name="F25",
            title="killed, back soon; a worker dies meanwhile and is a ghost (F29)",
            strike=killed,
            sign="etcd_watch_broken",
            lasts_s=2.0,
        ),
        EtcdFault(
            name="F26",
            title="down; a worker dies meanwhile (F29)",
            strike=killed,
            sign="etcd_watch_broken",
            lasts_s=60.0,
        ),
        EtcdFault(
            name="F27",
            title="frozen past the TTL",
            strike=frozen,
            sign="worker_vanished",
            lasts_s=TTL_S + 2,
        ),
        EtcdFault(name="F28", title="its data wiped", strike=wiped, sign="etcd_history_gone"),
        EtcdFault(
            name="F30",
            title="a proxy misses a deletion, then finds the history compacted",
            strike=deletion_lost,
            sign="etcd_history_gone",
            lasts_s=TTL_S + 2,
        ),
        EtcdFault(
            name="F31",
            title="the leader of three killed",
            strike=leader_killed,
            sign="etcd_watch_broken",
            lasts_s=3.0,
            has_users=True,
        ),
        EtcdFault(
            name="F32",
            title="the leases of healthy workers lost",
            strike=leases_lost,
            sign="worker_vanished",
        ),
        EtcdFault(
            name="F33",
            title="disk full (NOSPACE)",
            strike=disk_full,
            sign="announce_failed",
            lasts_s=2 * TTL_S,
        ),
        EtcdFault(
            name="token",
            title="every token expired",
            strike=tokens_expired,
            lasts_s=TOKEN_TTL_S + 1.0,
            has_users=True,
        ),
    )
}


FIRST: tuple[tuple[str, Role], ...] = (
    ("p0", "prefill"),
    ("p1", "prefill"),
    ("d0", "decode"),
    ("d1", "decode"),
)


async def befall(stage: Stage, fault: EtcdFault) -> None:
    """The fault, the agreement after it, and a new worker for each that died meanwhile."""
    cluster = stage.cluster
    async with stage.etcd_trouble(f"{fault.name} {fault.title}") as event:
        await fault.strike(stage, fault.lasts_s)
    await cluster.settled()
    event.settled_s = unix_s()
    if fault.sign and not cluster.has_logged(fault.sign, event.begun_s):
        raise RuntimeError(f"{fault.name} befell nobody: no process logged {fault.sign}")
    num_missing = len(FIRST) - len(cluster.here())
    for _ in range(num_missing):
        await stage.join(f"d{len(cluster.workers)}", "decode")
    if num_missing:
        await cluster.settled()
