"""Workers that cannot work together: the client hears why, and does not wait for it."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai_kit import Answer, Client, Refused, eventually
from process_kit import Part, part, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

# A request does not wait long for workers that can serve it.
PROXY = ("proxy", "--port=0", "--queue-timeout-s=0.5")


@asynccontextmanager
async def client_of(proxy: Part, *, num_workers: int) -> AsyncIterator[Client]:
    """A client of this proxy once it knows of so many workers."""
    async with session_of_many() as session:
        client = Client(session, proxy.url, "m")

        async def all_known() -> bool | None:
            report = await client.get("/status")
            return True if len(report["workers"]) == num_workers else None

        await eventually(all_known)
        yield client


def worker(folder: Path, role: str, proxy: Part, *flags: str) -> tuple[str, ...]:
    assert proxy.registry is not None
    name = (f"--role={role}", f"--worker-id={role}-0", "--model-name=m", "--threads=1")
    return ("worker", str(folder), *name, f"--registry={proxy.registry}", *flags)


async def refusal_of(client: Client, *, stream: bool = False) -> Refused:
    with pytest.raises(Refused) as refused:
        await client.ask("hello", max_tokens=9, ignore_eos=True, stream=stream)
    return refused.value


async def test_workers_of_different_checkpoints(checkpoint: Callable[[str], Path]) -> None:
    async with (
        part(*PROXY) as proxy,
        part(*worker(checkpoint("llama"), "prefill", proxy)),
        part(*worker(checkpoint("mistral"), "decode", proxy)),
        client_of(proxy, num_workers=2) as client,
    ):
        refused = await refusal_of(client)
        assert refused.status == 503
        assert "agree on weights, KV layout and transfer engine" in refused.error["message"]
        assert (await client.get("/health"))["status"] == "unavailable"


async def test_decode_worker_that_is_bound_to_another_prefill_worker(llama: Path) -> None:
    async with (
        part(*PROXY) as proxy,
        part(*worker(llama, "prefill", proxy)) as prefill,
        part(*worker(llama, "decode", proxy, "--static-peer=127.0.0.1:1")),
        client_of(proxy, num_workers=2) as client,
    ):
        for stream in (False, True):
            refused = await refusal_of(client, stream=stream)
            assert refused.error["code"] == "peer_refused"
            assert refused.status == 502 or (stream and refused.status == 200)  # token 0 was first
            assert refused.error["message"] == "decode-0 is bound to (hidden)"
        load = await client.until_idle()
        assert load["prefill-0"]["num_blocks_free"] > 0

        # And one that is gone, although the registry does not know it yet.
        prefill.process.kill()
        await prefill.process.wait()
        refused = await refusal_of(client)
        assert refused.status in (502, 503)
        # Whoever is faster to say why: a leg, or the proxy that noticed.
        message = refused.error["message"]
        reasons = ("prefill-0", "decode-0 is bound to", "no prefill worker is ready")
        assert any(reason in message for reason in reasons)


async def test_decode_worker_that_cannot_reach_the_prefill_worker(llama: Path) -> None:
    async with (
        part(*PROXY) as proxy,
        part(*worker(llama, "prefill", proxy)) as prefill,
        part(*worker(llama, "decode", proxy, "--peer-connect-timeout-s=0.5")) as decode,
        client_of(proxy, num_workers=2) as client,
    ):
        prefill.process.send_signal(signal.SIGSTOP)  # it is there, and answers nobody
        refused = await refusal_of(client)
        # The decode worker's word, or the proxy's once it has noticed.
        told = (refused.status, refused.error["code"], refused.error["message"][:30])
        assert told in (
            (504, "peer_timeout", "no answer from prefill worker "),
            (503, "over_capacity", "no prefill worker is ready for"),
        )

        prefill.process.send_signal(signal.SIGCONT)
        answer = await eventually(lambda: _answer_or_none(client))
        assert answer.finish_reason == "length"
        await client.until_idle()

        decode.process.kill()
        await decode.process.wait()
        refused = await refusal_of(client)
        assert refused.status in (502, 503)
        assert "decode" in refused.error["message"]
        assert prefill.process.returncode is None


async def _answer_or_none(client: Client) -> Answer | None:
    try:
        return await client.ask("hello", max_tokens=9, ignore_eos=True)
    except Refused:
        return None
