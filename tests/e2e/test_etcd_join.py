"""`neuron-di worker --etcd …` joins a running cluster: nobody is told, nothing is restarted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from etcd.etcd_kit import PASSWORD, Etcd, certificates, running_etcd
from openai_kit import Answer, Client, eventually
from process_kit import Part, part, run, session_of_many

from neuron_di.etcd.child import free_ports

pytestmark = pytest.mark.e2e

PROMPT, PARAMS = "def main(", {"max_tokens": 8, "ignore_eos": True}


@dataclass(slots=True)
class Cluster:
    """One prefill and one decode worker, a proxy, and how all of them reach etcd."""

    model: Path
    flags: tuple[str, ...]
    stack: AsyncExitStack
    client: Client
    parts: dict[str, Part] = field(default_factory=dict)

    async def worker(self, worker_id: str, *, role: str) -> None:
        """Start one. It is ready when this returns, as it says itself."""
        self.parts[worker_id] = await self.stack.enter_async_context(
            part(
                *("worker", str(self.model), f"--role={role}", f"--worker-id={worker_id}"),
                *("--model-name=m", "--threads=1", *self.flags),
            )
        )

    async def end(self, worker_id: str) -> None:
        """Ask one to end. It does so in good order."""
        process = self.parts[worker_id].process
        process.terminate()
        async with asyncio.timeout(60):
            await process.communicate()
        assert process.returncode == 0

    async def known(self) -> set[str]:
        """The workers that the proxy knows. It has refused none."""
        report = await self.client.get("/status")
        assert report["refused"] == []
        return {each["record"]["worker_id"] for each in report["workers"]}

    async def first_served_by(self, leg: str, worker_id: str) -> list[Answer]:
        """Ask, one request after another, until this worker has had a leg. All answers."""
        answers = []
        while True:
            answers.append(await self.client.ask(PROMPT, **PARAMS))
            receipt = await self.client.receipt(answers[-1].answer_id)
            if receipt[leg]["worker_id"] == worker_id:
                return answers


@asynccontextmanager
async def running_cluster(model: Path, *etcd_flags: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(part("proxy", "--port=0", *etcd_flags))
        session = await stack.enter_async_context(session_of_many())
        cluster = Cluster(model, etcd_flags, stack, Client(session, proxy.url, "m"))
        cluster.parts["proxy"] = proxy
        for role in ("prefill", "decode"):
            await cluster.worker(f"{role}-0", role=role)
        await eventually(lambda: _ok(cluster.client))
        yield cluster


def addresses_of(etcd: Etcd) -> str:
    """The first of them is dead: it must be passed over."""
    (dead_port,) = free_ports(1)
    return ",".join([f"127.0.0.1:{dead_port}", *etcd.addresses])


async def check_joins(cluster: Cluster) -> None:
    """A second worker of each role has its part of the requests, and not one fails meanwhile."""
    client = cluster.client
    wanted = (await client.ask(PROMPT, **PARAMS)).text
    for role in ("prefill", "decode"):
        joined = f"{role}-1"
        await cluster.worker(joined, role=role)
        answers = await cluster.first_served_by(role, joined)
        assert {answer.text for answer in answers} == {wanted}
    assert await cluster.known() == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(each.process.returncode is None for each in cluster.parts.values())
    shown = await run("status", "--url", client.url)
    assert shown.code == 0
    assert all(f"{name} " in shown.stdout for name in ("prefill-1", "decode-1"))
    # It leaves as it came: told to end, it is nobody's partner any more.
    for leaving in ("prefill-0", "decode-0"):
        await cluster.end(leaving)
        assert (await client.ask(PROMPT, **PARAMS)).text == wanted


async def test_workers_join_through_etcd_although_one_of_its_addresses_is_dead(llama: Path) -> None:
    async with (
        running_etcd() as etcd,
        running_cluster(llama, f"--etcd={addresses_of(etcd)}") as cluster,
    ):
        await check_joins(cluster)


async def check_is_let_in(cluster: Cluster) -> None:
    """The workers, which were started after the proxy, serve and leave as they came."""
    answer = await cluster.client.ask(PROMPT, **PARAMS)
    receipt = await cluster.client.receipt(answer.answer_id)
    assert (receipt["prefill_worker"], receipt["decode_worker"]) == ("prefill-0", "decode-0")
    assert await cluster.known() == {"prefill-0", "decode-0"}
    await cluster.end("decode-0")

    async def is_gone() -> bool | None:
        return True if await cluster.known() == {"prefill-0"} else None

    await eventually(is_gone)
    assert (await cluster.client.get("/health"))["status"] == "unavailable"


async def test_workers_join_with_client_certificates(llama: Path) -> None:
    """The certificate's name is the user: there is no password anywhere."""
    async with running_etcd(tls=True) as etcd:
        etcd.enable_users()
        pem = certificates()
        flags = (
            f"--etcd={addresses_of(etcd)}",
            f"--etcd-ca={pem.path('ca.pem')}",
            f"--etcd-cert={pem.path('worker.pem')}",
            f"--etcd-key={pem.path('worker.key')}",
        )
        async with running_cluster(llama, *flags) as cluster:
            await check_is_let_in(cluster)


async def test_workers_join_with_a_password(llama: Path, tmp_path: Path) -> None:
    """And with tokens so short that each process needs further ones."""
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o600)
    async with running_etcd(flags=("--auth-token-ttl=1",)) as etcd:
        etcd.enable_users()
        flags = (
            f"--etcd={addresses_of(etcd)}",
            "--etcd-user=worker",
            f"--etcd-password-file={password}",
        )
        async with running_cluster(llama, *flags) as cluster:
            await check_is_let_in(cluster)


async def test_who_may_not_says_so_and_joins_when_it_may(llama: Path, tmp_path: Path) -> None:
    """A user without the role: the worker waits for the operator, and is not restarted."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    async with running_etcd() as etcd:
        etcd.enable_users()
        there = f"--etcd={etcd.addresses[0]}"
        who = ("--etcd-user=worker", f"--etcd-password-file={password}")
        barred = ("--etcd-user=nobody", f"--etcd-password-file={password}")
        async with (
            part("proxy", "--port=0", there, *who) as proxy,
            part(
                *("worker", str(llama), "--role=both", "--worker-id=late", "--model-name=m"),
                *("--threads=1", there, *barred),
            ),
            session_of_many() as session,
        ):
            client = Client(session, proxy.url, "m")
            assert (await client.get("/status"))["workers"] == []
            etcd.ctl("user", "grant-role", "nobody", "neuron-di")

            async def has_joined() -> bool | None:
                return True if (await client.get("/status"))["workers"] else None

            await eventually(has_joined)
            await eventually(lambda: _ok(client))
            assert (await client.ask(PROMPT, **PARAMS)).finish_reason == "length"


async def _ok(client: Client) -> bool | None:
    return True if (await client.get("/health"))["status"] == "ok" else None
