"""`neuron-di role` under load: it did switch, nothing failed, nobody took it for the old one."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from drain_kit import under_load
from openai_kit import Client, eventually
from process_kit import command, part, run, said, session_of_many

from neuron_di.registry import RegistryClient

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.timeout(300)
async def test_a_worker_changes_its_role_both_ways_under_load(tiny_tales: Path) -> None:
    async with command(
        "serve", str(tiny_tales), "--prefill=2", "--decode=2", "--port=0", "--threads=1"
    ) as serving:
        url = (await said(serving, r"serving tiny-tales at (http://\S+)/v1$"))[1]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-tales")
            async with under_load(client) as load:
                await _change(client, "decode-1", "decode", "prefill")
                await load.more(16)
                await _change(client, "prefill-0", "prefill", "decode")
                await load.more(16)
                await _change(client, "decode-1", "prefill", "both")
                await load.more(16)
                await _change(client, "decode-1", "both", "decode")
            records = {each["worker_id"]: each for each in await _records(client)}
            roles = {name: record["role"] for name, record in records.items()}
            assert roles == {
                "prefill-0": "decode",
                "prefill-1": "prefill",
                "decode-0": "decode",
                "decode-1": "decode",
            }
            await client.until_idle()
            for record in records.values():  # each has mapped the arena once, and no old one
                assert _num_pools(record["pid"], "rw") == 1
            decodes = [each["pid"] for each in records.values() if each["role"] == "decode"]
            await eventually(lambda: _true_if_maps(decodes, 0))  # where their peers' pools lie, too

            for arguments, words in (
                (("decode-0", "decode"), "decode-0 is a decode worker already"),
                (("prefill-1", "decode"), "no other prefill worker would be left for model tiny"),
            ):
                refused = await run("role", *arguments, "--url", url)
                assert refused.code == 1
                assert refused.stderr.startswith(f"neuron-di: {words}")


@pytest.mark.timeout(300)
async def test_a_worker_that_crashes_is_started_in_the_role_it_has_now(llama: Path) -> None:
    async with command(
        "serve", str(llama), "--prefill=1", "--decode=2", "--port=0", "--threads=1"
    ) as serving:
        url = (await said(serving, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-llama")
            await _change(client, "decode-1", "decode", "prefill")
            await said(serving, r"decode-1 is a prefill worker now; should it end, it is started")
            [before] = [each for each in await _records(client) if each["worker_id"] == "decode-1"]
            os.kill(before["pid"], signal.SIGKILL)
            await said(serving, r"decode-1 was ended by signal 9; starting it again")
            pid = int((await said(serving, r"decode-1 is back \(pid (\d+)\)"))[1])
            await eventually(lambda: _true_if_role(client, pid, "prefill"))


async def _true_if_role(client: Client, pid: int, role: str) -> bool | None:
    """Whether the process serves in this role."""
    roles = {record["pid"]: record["role"] for record in await _records(client)}
    assert roles.get(pid, role) == role
    return pid in roles or None


async def test_the_registry_has_the_worker_once_wherever_it_is(llama: Path) -> None:
    async with part("proxy", "--port=0") as proxy, session_of_many() as session:
        assert proxy.registry is not None
        flags = ("--threads=1", f"--registry={proxy.registry}", "--model-name=m")
        async with (
            part("worker", str(llama), "--role=prefill", "--worker-id=p", *flags),
            part("worker", str(llama), "--role=decode", "--worker-id=a", *flags),
            part("worker", str(llama), "--role=decode", "--worker-id=b", *flags) as changed,
        ):
            client = Client(session, proxy.url, "m")
            await eventually(lambda: _true_if_known(client, 3))
            await _change(client, "b", "decode", "prefill")
            async with RegistryClient(proxy.registry) as registry:
                snapshot = await anext(registry.watch("/workers/"))
            keys = sorted(key.split("/")[2] for key in snapshot.values)  # type: ignore[union-attr]
            assert keys == ["decode", "prefill", "prefill"]
            port = changed.url.rpartition(":")[2]
            assert sum(key.endswith(f"/{port}") for key in snapshot.values) == 1  # type: ignore[union-attr]
            alone = await run("role", "a", "prefill", "--url", proxy.url)
            assert alone.stderr == (
                "neuron-di: no other decode worker would be left for model m: give --force if "
                "that is meant\n"
            )
            forced = await run("role", "a", "prefill", "--url", proxy.url, "--force")
            assert "it did switch: decode -> prefill" in forced.stdout
            assert "no self-test: there is no partner" in forced.stdout


async def test_a_role_there_is_no_memory_for_is_refused_and_nothing_changes(llama: Path) -> None:
    """A worker that is bound to one partner cannot change either."""
    async with (
        part("worker", str(llama), "--role=prefill", "--threads=1") as prefill,
        session_of_many() as session,
    ):
        record = (await Client(session, prefill.url, "").get("/status"))["record"]
        signal = f"{record['signal_host']}:{record['signal_port']}"
        async with (
            part(
                "worker", str(llama), "--role=decode", "--threads=1", f"--static-peer={signal}",
                "--worker-id=d",
            ) as decode,
            part(
                "proxy", "--port=0", f"--prefill-urls={prefill.url}", f"--decode-urls={decode.url}"
            ) as proxy,
        ):  # fmt: skip
            client = Client(session, proxy.url, "tiny-llama")
            await eventually(lambda: _true_if_known(client, 2))
            before = {each["incarnation"] for each in await _records(client)}
            refused = await run("role", "d", "both", "--url", proxy.url, "--force")
            assert refused.stderr == (
                "neuron-di: this worker is bound to one partner by --static-peer\n"
            )
            assert {each["incarnation"] for each in await _records(client)} == before
            assert (await client.ask("hello", max_tokens=3)).text


def _num_pools(pid: int, access: str) -> int:
    """How many KV pools a process has mapped: its own for writing, its peers' for reading."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return sum("neuron-di-kv" in line and f" {access}" in line for line in maps.splitlines())


async def _true_if_maps(pids: list[int], num_peers: int) -> bool | None:
    return all(_num_pools(pid, "r--") == num_peers for pid in pids) or None


async def _change(client: Client, worker: str, before: str, role: str) -> None:
    old = {each["worker_id"]: each["incarnation"] for each in await _records(client)}
    ended = await run("role", worker, role, "--url", client.url)
    assert (ended.code, ended.stderr) == (0, ""), ended.stdout
    lines = ended.stdout.splitlines()
    assert lines[0] == f"✓ {worker} can become a {role} worker"
    assert "✓ it is no longer in the registry" in lines
    last = re.fullmatch(rf"✓ it did switch: {before} -> {role}, incarnation (\w+), (.*)", lines[-1])
    assert last is not None, lines[-1]
    assert last[1] != old[worker]
    if role == "both":
        assert last[2] == "no self-test: it needs no partner"
    else:
        assert re.fullmatch(r"self-test ok with \S+", last[2])
    new = {each["worker_id"]: each for each in await _records(client)}[worker]
    assert (new["role"], new["state"], new["incarnation"]) == (role, "ready", last[1])


async def _records(client: Client) -> list[dict[str, Any]]:
    return [each["record"] for each in (await client.get("/status"))["workers"]]


async def _true_if_known(client: Client, num: int) -> bool | None:
    states = [each["state"] for each in await _records(client)]
    return True if states == ["ready"] * num else None
