"""A cluster on several hosts, as far as one kernel has them: each a network namespace.

    etcd     TLS, client certificates, users        control
    front    proxy, prefill-0, decode-1             control, data
    back     decode-0                               control, data
    far      the client, and one more proxy         control, data

All speak to etcd over the control network and to each other over the data network, so either can
be cut alone. What runs on `back` sees no other host's processes, so that KV goes there by TCP, and
by shared memory within `front`.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from asking_kit import PARAMS, PROMPT, ask_until, asking, true_if
from etcd.etcd_kit import require_etcd
from hosts_kit import PROCESSES_APART, Host, network, require_namespaces
from openai_kit import Answer, Client, Refused, eventually
from process_kit import said, session_of_many

from neuron_di.testing import write_random_checkpoint

SCRIPTS = Path(__file__).parents[2] / "examples" / "certificates"
TTL_S = 2
LARGE = "Once upon a time there was a fox. " * 24  # KV that a slow network takes a while for
SLOW_BITS_PER_S = 1_000_000
LONG = {"max_tokens": 400, "ignore_eos": True}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(150),  # the first one starts the cluster
]


@dataclass(slots=True)
class Cluster:
    """The hosts, what runs there, and a client at `far`."""

    hosts: dict[str, Host]
    etcd_flags: dict[str, tuple[str, ...]]  # by user
    stack: AsyncExitStack
    client: Client
    pids: dict[str, int] = field(default_factory=dict)

    async def start(self, where: str, name: str, *arguments: str) -> str:
        """`neuron-di` with these arguments on a host, ready. Returns its URL."""
        return await self.stack.enter_async_context(
            running(self.hosts[where], *arguments, pids=self.pids, name=name)
        )

    async def worker(self, worker_id: str) -> dict:
        """What the proxy reports of one worker; empty while it knows none of that name."""
        workers = (await self.client.get("/status"))["workers"]
        return next((each for each in workers if each["record"]["worker_id"] == worker_id), {})

    async def until(self, worker_id: str, **wanted: object) -> None:
        async def is_so() -> bool | None:
            worker = await self.worker(worker_id)
            return True if wanted.items() <= worker.items() else None

        await eventually(is_so)

    async def with_lane(self, worker_id: str) -> dict:
        """The same, once it has tried out a lane, which it does in its own time."""

        async def look() -> dict | None:
            worker = await self.worker(worker_id)
            return worker if (worker.get("status") or {}).get("lanes") else None

        return await eventually(look)

    async def served_by(self, worker_id: str) -> Answer:
        """Ask until this decode worker served one. Every request must be answered."""
        while True:
            answer = await self.client.ask(PROMPT, **PARAMS)
            receipt = await self.client.receipt(answer.answer_id)
            if receipt["decode"]["worker_id"] == worker_id:
                return answer

    def listed(self) -> list[str]:
        """Below the prefix in etcd, now."""
        pem = self.etcd_flags["root"]
        words = ("get", "--prefix", "--keys-only", "/neuron-di/")
        return self.hosts["etcd"].run("env", "ETCDCTL_API=3", "etcdctl", *pem, *words).split()


@asynccontextmanager
async def running(
    host: Host, *arguments: str, pids: dict[str, int], name: str
) -> AsyncIterator[str]:
    words = (sys.executable, "-m", "neuron_di", *arguments)
    process = await asyncio.create_subprocess_exec(
        *host.command(*PROCESSES_APART, *words) if host.name == "back" else host.command(*words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    pids[name] = process.pid
    try:
        ready = await said(process, r"event=ready .*url=(\S+)")
        rest = asyncio.create_task(process.stderr.read())  # it must not wait for us
        yield ready[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await rest


@asynccontextmanager
async def running_etcd(host: Host, folder: Path) -> AsyncIterator[str]:
    """etcd with the users of the example's scripts. Its address."""
    pem, address = folder / "pem", "10.78.0.1:2379"
    host.run("sh", str(SCRIPTS / "make_certificates.sh"), str(pem), "10.78.0.1")
    process = await asyncio.create_subprocess_exec(
        *host.command(
            "etcd",
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls=https://{address}",
            f"--advertise-client-urls=https://{address}",
            f"--cert-file={pem / 'server.pem'}",
            f"--key-file={pem / 'server.key'}",
            f"--trusted-ca-file={pem / 'ca.pem'}",
            "--client-cert-auth",
            "--heartbeat-interval=20",
            "--election-timeout=200",
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def users_are_there() -> bool | None:
            try:
                host.run("sh", str(SCRIPTS / "make_users.sh"), str(pem), address)
            except AssertionError:
                assert process.returncode is None, "etcd has ended"
                return None
            return True

        await eventually(users_are_there)
        yield address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def etcd_flags(address: str, pem: Path, user: str) -> tuple[str, ...]:
    return (
        f"--etcd={address}",
        f"--etcd-ttl-s={TTL_S}",
        f"--etcd-ca={pem / 'ca.pem'}",
        f"--etcd-cert={pem / user}.pem",
        f"--etcd-key={pem / user}.key",
    )


def worker_flags(cluster: Cluster, model: Path, host: str, worker_id: str) -> tuple[str, ...]:
    return (
        *("worker", str(model), "--model-name=m", "--threads=1", f"--worker-id={worker_id}"),
        *(f"--role={worker_id.partition('-')[0]}", f"--host={host}", "--insecure"),
        *cluster.etcd_flags["neuron-di-worker"],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    require_etcd()
    require_namespaces()
    folder = tmp_path_factory.mktemp("hosts")
    model = folder / "tiny"
    write_random_checkpoint(model, "llama")
    async with AsyncExitStack() as stack:
        net = stack.enter_context(network())
        hosts = {
            "etcd": net.host("etcd", control="10.78.0.1"),
            "front": net.host("front", control="10.78.0.2", data="10.77.0.2"),
            "back": net.host("back", control="10.78.0.3", data="10.77.0.3"),
            "far": net.host("far", control="10.78.0.4", data="10.77.0.4"),
        }
        address = await stack.enter_async_context(running_etcd(hosts["etcd"], folder))
        users = ("neuron-di-worker", "neuron-di-proxy")
        flags = {user: etcd_flags(address, folder / "pem", user) for user in users}
        flags["root"] = (
            f"--endpoints=https://{address}",
            f"--cacert={folder / 'pem' / 'ca.pem'}",
            f"--cert={folder / 'pem' / 'root.pem'}",
            f"--key={folder / 'pem' / 'root.key'}",
        )
        stack.enter_context(hosts["far"].entered())
        session = await stack.enter_async_context(session_of_many())
        cluster = Cluster(hosts, flags, stack, Client(session, "", "m"))
        proxy = ("proxy", "--host=10.77.0.2", "--port=8000", "--insecure")
        networks = "--worker-networks=10.77.0.0/24"
        url, *_ = await asyncio.gather(
            cluster.start("front", "proxy", *proxy, networks, *flags["neuron-di-proxy"]),
            *(
                cluster.start(where, name, *worker_flags(cluster, model, host, name))
                for where, host, name in (
                    ("front", "10.77.0.2", "prefill-0"),
                    ("front", "10.77.0.2", "decode-1"),
                    ("back", "10.77.0.3", "decode-0"),
                )
            ),
        )
        cluster.client.url = url
        for name in ("prefill-0", "decode-0", "decode-1"):
            await cluster.until(name, health="up")
        yield cluster


async def test_a_request_is_served_across_hosts(cluster: Cluster) -> None:
    answer = await cluster.served_by("decode-0")
    receipt = await cluster.client.receipt(answer.answer_id)
    assert receipt["kv_bytes"] > 0
    assert receipt["link"] == "tcp"
    assert receipt["prefill"]["worker_id"] == "prefill-0"
    assert cluster.client.url == "http://10.77.0.2:8000"
    decode = await cluster.with_lane("decode-0")
    assert decode["record"]["host"] == "10.77.0.3"
    assert decode["status"]["num_fallbacks"] == 0
    (lane,) = decode["status"]["lanes"]
    assert (lane["peer"], lane["engine"]) == ("prefill-0", "tcp")
    assert lane["reason"].startswith("shm: the peer is on another machine")
    beside = await cluster.with_lane("decode-1")
    (near,) = beside["status"]["lanes"]
    assert (near["engine"], near["reason"]) == ("shm", "shm: chosen")
    prefill = (await cluster.worker("prefill-0"))["record"]
    shm, tcp = prefill["transfer"]
    assert shm in beside["record"]["transfer"]
    assert shm not in decode["record"]["transfer"]
    assert tcp in decode["record"]["transfer"]
    assert prefill["signal_host"] == "10.77.0.2"
    assert len(prefill["signal_key"]) == 40, "what they say to each other is encrypted"
    listed = [
        "/neuron-di/workers/decode/10.77.0.2",
        "/neuron-di/workers/decode/10.77.0.3",
        "/neuron-di/workers/prefill/10.77.0.2",
    ]
    # Who was late with a beat of two seconds is listed again.
    await eventually(
        lambda: true_if([key.rpartition("/")[0] for key in cluster.listed()] == listed)
    )


async def test_a_host_that_loses_etcd_goes_on_serving_and_is_listed_again(
    cluster: Cluster,
) -> None:
    """Its key vanishes with the lease. It is known, it answers, and that counts."""
    wanted = (await cluster.client.ask(PROMPT, **PARAMS)).text
    async with asking(cluster.client, wanted) as load:
        cluster.hosts["back"].pull("control")
        try:
            await eventually(lambda: true_if(not _has(cluster.listed(), "10.77.0.3")))
            await load.more(8)
            await cluster.served_by("decode-0")
            await eventually(lambda: _is_missed(cluster, "decode-0"))
        finally:
            cluster.hosts["back"].plug("control")
        await eventually(lambda: true_if(_has(cluster.listed(), "10.77.0.3")))
        await cluster.until("decode-0", vanished_s=None, health="up")
        await load.more(8)
    await cluster.client.until_idle()


async def test_what_ran_on_a_host_that_is_cut_off_goes_on_elsewhere(cluster: Cluster) -> None:
    """etcd still lists it: that is not what counts."""
    wanted = await cluster.client.ask(PROMPT, **LONG)
    is_cut = asyncio.Event()
    asked = [asyncio.create_task(ask_until(cluster.client, is_cut, **LONG)) for _ in range(8)]

    async def runs_there() -> bool | None:
        worker = await cluster.worker("decode-0")
        status = worker.get("status") or {}  # which it may be too busy to give
        return True if worker["num_open"] and status.get("num_running") else None

    await eventually(runs_there)
    await asyncio.to_thread(cluster.hosts["back"].pull, "data")
    is_cut.set()
    try:
        answers = [answer for each in asked for answer in await each]
        assert [answer.text for answer in answers] == [wanted.text] * len(answers)
        receipts = [await cluster.client.receipt(answer.answer_id) for answer in answers]
        assert any(len(each["attempts"]) > 1 for each in receipts)
        await eventually(lambda: _is_lost(cluster, "decode-0"))
        await eventually(lambda: true_if(_has(cluster.listed(), "10.77.0.3")))
        for _ in range(4):
            assert (await cluster.client.ask(PROMPT, **PARAMS)).finish_reason == "length"
    finally:
        cluster.hosts["back"].plug("data")
    await cluster.until("decode-0", health="up")
    await cluster.served_by("decode-0")
    await cluster.client.until_idle()


async def test_a_cable_that_is_pulled_in_the_middle_of_a_transfer(cluster: Cluster) -> None:
    """Its requests go on elsewhere, nothing of the transfer stays, and the lane comes back."""
    back = cluster.hosts["back"]
    wanted = await cluster.client.ask(LARGE, **PARAMS)
    try:
        back.throttle("data", SLOW_BITS_PER_S)
    except OSError as error:
        pytest.skip(f"no slow network here: {error}")
    asked: list[asyncio.Task[Answer]] = []
    try:
        asked += [asyncio.create_task(cluster.client.ask(LARGE, **PARAMS)) for _ in range(8)]
        await eventually(lambda: _receives(cluster, "decode-0"))
        back.pull("data")
        answers = await asyncio.gather(*asked)
        assert [answer.text for answer in answers] == [wanted.text] * len(answers)
        receipts = [await cluster.client.receipt(answer.answer_id) for answer in answers]
        firsts = [each["attempts"][0] for each in receipts if len(each["attempts"]) > 1]
        assert "decode-0" in {each["decode_worker"] for each in firsts}
        assert all(each["code"] for each in firsts)
    finally:
        back.release("data")
        back.plug("data")
    await cluster.until("decode-0", health="up")
    again = await cluster.served_by("decode-0")
    assert (await cluster.client.receipt(again.answer_id))["link"] == "tcp"
    load = await cluster.client.until_idle()
    assert not any(status["num_kv_mismatched"] for status in load.values())


async def test_a_proxy_on_a_further_host_joins(cluster: Cluster) -> None:
    url = await cluster.start(
        *("far", "further proxy", "proxy", "--host=10.77.0.4", "--port=8000", "--insecure"),
        *cluster.etcd_flags["neuron-di-proxy"],
    )
    there = Client(cluster.client.session, url, "m")

    async def is_served() -> Answer | None:
        try:
            return await there.ask(PROMPT, **PARAMS)
        except Refused:
            return None

    answer = await eventually(is_served)
    assert answer.text == (await cluster.client.ask(PROMPT, **PARAMS)).text
    known = {each["record"]["worker_id"] for each in (await there.get("/status"))["workers"]}
    assert known == {"prefill-0", "decode-0", "decode-1"}


async def _receives(cluster: Cluster, worker_id: str) -> bool | None:
    status = (await cluster.worker(worker_id)).get("status")
    if status is None:  # nobody has heard of it for a moment
        return None
    return True if status["num_blocks_receiving"] and status["num_transferring"] else None


async def _is_missed(cluster: Cluster, worker_id: str) -> bool | None:
    """Whether its key is gone, as far as the proxy has heard."""
    return True if (await cluster.worker(worker_id))["vanished_s"] else None


async def _is_lost(cluster: Cluster, worker_id: str) -> bool | None:
    health = (await cluster.worker(worker_id))["health"]
    return True if re.fullmatch("frozen|down", health) else None


def _has(keys: list[str], host: str) -> bool:
    return any(f"/{host}/" in key for key in keys)
