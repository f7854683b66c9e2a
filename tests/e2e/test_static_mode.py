"""The parts started alone: with a registry, and with fixed addresses and no registry."""

import asyncio
import signal
from pathlib import Path

import pytest
from chaos.fault_proxy import free_ports
from openai_kit import Client, eventually
from process_kit import Part, part, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

WORKER = ("--model-name=m", "--threads=1")


async def test_parts_with_a_registry(llama: Path) -> None:
    async with part("proxy", "--port=0") as proxy:
        registry = f"--registry={proxy.registry}"
        async with (
            part("worker", str(llama), "--role=prefill", registry, *WORKER),
            part("worker", str(llama), "--role=decode", registry, *WORKER) as decode,
        ):
            await _check_serves(proxy, decode_role="decode")
            # A worker that is told to stop withdraws, drains and ends.
            decode.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(decode.process.communicate(), 60)
            assert decode.process.returncode == 0
            async with session_of_many() as session:
                health = await eventually(lambda: _unavailable(Client(session, proxy.url, "m")))
            assert health["reason"] == "no decode worker is ready for model 'm'"


async def test_static_1p1d_without_a_registry(llama: Path) -> None:
    (signal_port,) = free_ports(1)
    async with (
        part(
            "worker", str(llama), "--role=prefill", f"--signal-port={signal_port}", *WORKER
        ) as prefill,
        part(
            "worker",
            str(llama),
            "--role=decode",
            f"--static-peer=127.0.0.1:{signal_port}",
            *WORKER,
        ) as decode,
        part(
            "proxy", "--port=0", f"--prefill-urls={prefill.url}", f"--decode-urls={decode.url}"
        ) as proxy,
    ):
        await _check_serves(proxy, decode_role="decode")


async def test_combined_worker_alone(llama: Path) -> None:
    async with (
        part("proxy", "--port=0") as proxy,
        part("worker", str(llama), "--role=both", f"--registry={proxy.registry}", *WORKER),
    ):
        await _check_serves(proxy, decode_role="both")


async def _check_serves(proxy: Part, *, decode_role: str) -> None:
    async with session_of_many() as session:
        client = Client(session, proxy.url, "m")
        await eventually(lambda: _available(client))
        assert [model["id"] for model in (await client.get("/v1/models"))["data"]] == ["m"]
        for stream in (False, True):
            answer = await client.ask("def main(", max_tokens=9, ignore_eos=True, stream=stream)
            receipt = await client.receipt(answer.answer_id)
            assert receipt["num_generated"] == 9
            assert receipt["decode"]["role"] == decode_role
            assert (receipt["kv_bytes"] > 0) == (decode_role == "decode")
        await client.until_idle()


async def _available(client: Client) -> bool | None:
    return True if (await client.get("/health"))["status"] == "ok" else None


async def _unavailable(client: Client) -> dict[str, str] | None:
    health: dict[str, str] = await client.get("/health")
    return None if health["status"] == "ok" else health
