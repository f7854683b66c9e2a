"""What the members of an etcd say of themselves, and whether a worker could announce itself there.

Loading this loads gRPC. ConfigError where it is not installed.
"""

import asyncio
import secrets
import statistics
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from neuron_di.clock import Deadline, now_s
from neuron_di.config import EtcdOptions
from neuron_di.doctor.etcd_door import Door, knock
from neuron_di.doctor.finding import Fact, Finding
from neuron_di.errors import NeuronDiError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.etcd.client import EtcdClient, MemberStatus
from neuron_di.etcd.failures import CorruptData, NoSpace, PermissionDenied
from neuron_di.etcd.key_value import KeyRange
from neuron_di.etcd.security import Security

MEMBER_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 5.0  # of each call
WRITE_TIMEOUT_S = 15.0  # of all calls of a write but its last, the revoke
TTL_S = 10.0  # of the key, should this process be killed
NUM_WRITES = 5
SKEW_S_MAX = 2.0
_NO_LEADER = "no leader"  # 3.4 may still name the one that is gone
# docs/etcd.md says why.
_GOOD_FROM = {(3, 4): (3, 4, 22), (3, 5): (3, 5, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What one member answered: `status`, or why there is none."""

    address: str
    door: Door
    status: MemberStatus | None = None
    cluster_id: int | None = None  # None: it may not be asked
    error: NeuronDiError | None = None


async def probe_members(options: EtcdOptions, security: Security) -> AsyncGenerator[Finding]:
    """A finding for each member, then for all of them, then of a write, where one answers."""
    key = f"{options.etcd_prefix.rstrip('/')}/doctor/{secrets.token_hex(8)}".encode()
    asked = [asyncio.create_task(_ask(address, options, security, key)) for address in options.etcd]
    members = []
    for task in asked:  # in their order, and each as soon as those before it
        members.append(await task)
        yield _of_member(members[-1])
    for member in members:
        skew_s = member.door.skew_s
        if skew_s is not None and abs(skew_s) > SKEW_S_MAX:
            yield _skewed(member.address, skew_s)
    answered = [member for member in members if member.status is not None]
    clusters = {member.cluster_id for member in answered} - {None}
    if len(clusters) > 1:
        yield Finding.failed(
            "etcd.clusters",
            f"--etcd names members of {len(clusters)} different clusters: workers would not "
            "find each other",
            "Name members of one cluster only: `etcdctl member list` shows them.",
            facts={"addresses": [member.address for member in answered]},
        )
    if answered:
        addresses = [member.address for member in answered]
        async with EtcdClient(addresses, security, call_timeout_s=PROBE_TIMEOUT_S) as client:
            yield await _write(client, key, options.etcd_prefix)


async def _ask(address: str, options: EtcdOptions, security: Security, key: bytes) -> _Member:
    door = await asyncio.to_thread(knock, address, options)
    if not door.is_open:
        return _Member(address=address, door=door)
    async with EtcdClient([address], security, call_timeout_s=MEMBER_TIMEOUT_S) as client:
        try:
            status = await client.status()
        except NeuronDiError as error:
            return _Member(address=address, door=door, error=error)
        try:
            cluster_id = (await client.list_keys(KeyRange(key))).cluster_id
        except NeuronDiError:
            cluster_id = None
    return _Member(address=address, door=door, status=status, cluster_id=cluster_id)


def _of_member(member: _Member) -> Finding:
    facts: dict[str, Fact] = {"address": member.address, "skew_s": member.door.skew_s}
    status = member.status
    if status is None:
        return _not_reached(member, facts)
    facts |= {"version": status.version, "db_bytes": status.db_size, "errors": list(status.errors)}
    says = f"{member.address} is etcd {status.version}"
    if status.leader == 0 or _NO_LEADER in " ".join(status.errors):
        return Finding.failed(
            "etcd.member",
            f"{says}, and sees no leader: it takes no writes",
            "Start the other members: more than half of them must run and reach each other.",
            facts=facts,
        )
    if status.errors:
        return Finding.failed(
            "etcd.member",
            f"{says}, and raises an alarm: {', '.join(status.errors)[:200]}",
            "NOSPACE: compact and defragment it, or raise its --quota-backend-bytes, then "
            "`etcdctl alarm disarm`. CORRUPT: replace that member.",
            facts=facts,
        )
    if not _is_good(status.version):
        return Finding.warning(
            "etcd.member",
            f"{says}, of those that can lose data or were not tried",
            "Use 3.4.22 or later, or 3.5.6 or later (docs/etcd.md).",
            facts=facts,
        )
    return Finding.ok("etcd.member", says, facts=facts)


def _not_reached(member: _Member, facts: dict[str, Fact]) -> Finding:
    why, mend = member.door.why, member.door.mend
    if not why:
        assert member.error is not None
        why, mend = member.error.message, _mend_of(member.error)
    return Finding.failed(
        "etcd.member", f"{member.address} cannot be used: {why}", mend, facts=facts
    )


def _mend_of(error: NeuronDiError) -> str:
    if isinstance(error, PermissionDenied):
        return "Grant our user a role for the prefix: examples/certificates/make_users.sh."
    if isinstance(error, NoSpace):
        return "Do so, and let it compact by itself: --auto-compaction-retention (docs/etcd.md)."
    if isinstance(error, CorruptData):
        return "Do so: stop that member, remove it, and add it with an empty folder of data."
    if isinstance(error, PeerTimeout | PeerGone):
        return "Look whether more than half of its members run, and at the load of their disks."
    if isinstance(error, RemoteProtocolError):
        return "Name etcd's client port, as a rule 2379: what answers there is something else."
    return "Correct --etcd-user and its password, or give a certificate (docs/etcd.md)."


def _is_good(version: str) -> bool:
    """By its numbers. What cannot be read, and what is older than 3.4, is not."""
    parts = version.split(".")[:3]
    if not all(part.isdecimal() for part in parts) or len(parts) < 3:
        return False
    major, minor, patch = map(int, parts)
    return (major, minor, patch) >= _GOOD_FROM.get((major, minor), (3, 4, 22))


def _skewed(address: str, skew_s: float) -> Finding:
    way = "ahead of" if skew_s > 0 else "behind"
    return Finding.warning(
        "etcd.clock",
        f"the clock of {address} is {abs(skew_s):g} s {way} this machine's",
        "Let both hosts follow the same source of time: chrony.",
        facts={"address": address, "skew_s": skew_s},
    )


async def _write(client: EtcdClient, key: bytes, prefix: str) -> Finding:
    """Does what a worker does when it comes and goes, below another name."""
    whole = Deadline.after(WRITE_TIMEOUT_S)

    def soon() -> Deadline:
        return Deadline.after(PROBE_TIMEOUT_S).earlier_of(whole)

    try:
        lease = await client.grant(TTL_S, deadline=soon())
        try:
            took_ms = []
            for number in range(NUM_WRITES):
                begun_s = now_s()
                await client.put(key, str(number).encode(), lease=lease, deadline=soon())
                took_ms.append((now_s() - begun_s) * 1e3)
            found = await client.get(key, deadline=soon())
            num_deleted = await client.delete(KeyRange(key), deadline=soon())
        finally:
            await client.revoke(lease, deadline=Deadline.after(PROBE_TIMEOUT_S))
    except PermissionDenied as error:
        return await _may_not_write(client, key, prefix, error)
    except NeuronDiError as error:
        return Finding.failed(
            "etcd.write",
            f"a worker could not announce itself below {prefix}: {error.message}",
            _mend_of(error),
        )
    if found is None or found.value != str(NUM_WRITES - 1).encode() or num_deleted != 1:
        return Finding.failed(
            "etcd.write",
            f"a key that was written below {prefix} was not there when it was read",
            "Look what deletes keys there, and whether all members are of one cluster.",
        )
    write_ms = statistics.median(took_ms)
    return Finding.ok(
        "etcd.write",
        f"a key below {prefix} was written under a lease, read and deleted; a write took "
        f"{write_ms:.1f} ms",
        facts={"write_ms": round(write_ms, 3), "write_ms_most": round(max(took_ms), 3)},
    )


async def _may_not_write(
    client: EtcdClient, key: bytes, prefix: str, error: NeuronDiError
) -> Finding:
    try:
        await client.get(key)
    except NeuronDiError:
        return Finding.failed(
            "etcd.write", f"our user may neither read nor write below {prefix}/", _mend_of(error)
        )
    return Finding.warning(
        "etcd.write",
        f"our user may read below {prefix}/ and not write: enough for a proxy, not for a worker",
        "Run the doctor as a worker's user too, or grant readwrite: "
        "examples/certificates/make_users.sh.",
    )
