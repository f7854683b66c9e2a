"""`neuron-di drain` under load: nothing fails, nothing is left, and nothing comes back."""

import asyncio
import re
from pathlib import Path

import msgspec
import psutil
import pytest
from drain_kit import under_load
from openai_kit import Client, eventually
from process_kit import Part, command, part, run, said, session_of_many

from neuron_di.registry import RegistryClient
from neuron_di.types import RequestId
from neuron_di.wire import Parked, PrefillLeg, SamplingParams, encode_json
from neuron_di.wire.leg_link import (
    FROM_WORKER_BYTES_MAX,
    MAGIC,
    FrameReader,
    OpenLeg,
    encode_frame,
    told_decoder,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

LONG = {"max_tokens": 900, "ignore_eos": True}


async def keys_of(registry: str) -> list[str]:
    async with RegistryClient(registry) as client:
        snapshot = await anext(client.watch("/workers/"))
    return sorted(snapshot.values)  # type: ignore[union-attr]


@pytest.mark.timeout(300)
async def test_a_decode_and_a_prefill_worker_are_drained_under_load(tiny_tales: Path) -> None:
    async with command(
        "serve", str(tiny_tales), "--prefill=2", "--decode=2", "--port=0", "--threads=1"
    ) as serving:
        url = (await said(serving, r"serving tiny-tales at (http://\S+)/v1$"))[1]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-tales")
            long = await client.ask("hello", **LONG)
            async with under_load(client) as load:
                asked = asyncio.gather(*(client.ask("hello", **LONG) for _ in range(4)))
                for worker in ("decode-1", "prefill-0"):
                    pid = await _pid_of(client, worker)
                    ended = await run("drain", worker, "--url", url)
                    assert (ended.code, ended.stderr) == (0, "")
                    assert f"✓ {worker} is empty: " in ended.stdout
                    assert "✓ it is no longer in the registry\n" in ended.stdout
                    assert "✓ its process answers no more\n" in ended.stdout
                    last = ended.stdout.splitlines()[-1]
                    assert re.fullmatch(
                        rf"✓ {worker} has ended: \d+ requests? finished, none failed", last
                    )
                    await said(serving, rf"^{worker} was drained and has ended; it is not started")
                    assert not psutil.pid_exists(pid)
                    await load.more(20)
                assert [answer.text for answer in await asked] == [long.text] * 4
            known = {each["record"]["worker_id"] for each in (await _workers(client))}
            assert known == {"decode-0", "prefill-1"}
            await client.until_idle()

            last_one = await run("drain", "decode-0", "--url", url)
            assert last_one.code == 1
            assert last_one.stderr == (
                "neuron-di: no other decode worker would be left for model tiny-tales: "
                "give --force if that is meant\n"
            )
            nobody = await run("drain", "decode-1", "--url", url)
            assert nobody.stderr == (
                "neuron-di: no worker is called decode-1; there are: decode-0, prefill-1\n"
            )
            forced = await run("drain", "decode-0", "--url", url, "--force")
            assert forced.code == 0
            assert [each["record"]["worker_id"] for each in await _workers(client)] == ["prefill-1"]


async def test_parked_kv_that_nobody_pulls_expires_before_the_end(llama: Path) -> None:
    """Meanwhile a second order joins the first, and everybody sees what it waits for."""
    async with part("proxy", "--port=0") as proxy, session_of_many() as session:
        assert proxy.registry is not None
        flags = ("--threads=1", f"--registry={proxy.registry}", "--model-name=m")
        async with (
            part("worker", str(llama), "--role=prefill", "--kv-lease-s=20", *flags) as prefill,
            part("worker", str(llama), "--role=decode", *flags),
        ):
            client = Client(session, proxy.url, "m")
            await eventually(lambda: _none_unless(client, 2))
            worker = next(
                each["record"]["worker_id"]
                for each in await _workers(client)
                if each["record"]["role"] == "prefill"
            )
            writer = await _park(prefill)
            first, second = await asyncio.gather(
                *(run("drain", worker, "--url", proxy.url, "--force") for _ in range(2))
            )
            writer.close()
            for ended in (first, second):
                assert ended.code == 1, "a request failed, and that shows"
                assert "1 parked KV (lease ends in " in ended.stdout
                assert ended.stdout.splitlines()[-1].endswith(
                    "has ended: 0 requests finished, 1 failed (kv_expired)"
                )
            joined = [ended for ended in (first, second) if "as ordered before" in ended.stdout]
            assert len(joined) == 1
            await asyncio.wait_for(prefill.process.wait(), 30)
            assert prefill.process.returncode == 0
            assert [key.split("/")[2] for key in await keys_of(proxy.registry)] == ["decode"]


async def test_at_its_time_limit_what_still_runs_is_cut_and_goes_on_elsewhere(
    tiny_tales: Path,
) -> None:
    """Whichever of two proxy processes is asked."""
    async with command(
        "serve", str(tiny_tales), "--decode=2", "--port=0", "--threads=1", "--processes=2"
    ) as serving:
        url = (await said(serving, r"serving tiny-tales at (http://\S+)/v1$"))[1]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-tales")
            lengths = (900, 850, 800)  # not all of them end at the same time
            wanted = {
                n: (await client.ask("hello", **LONG | {"max_tokens": n})).text for n in lengths
            }
            is_cut = asyncio.Event()

            async def keep_asking(num_tokens: int) -> None:
                """However long the command takes to start, these requests run when it comes."""
                while not is_cut.is_set():
                    answer = await client.ask("hello", **LONG | {"max_tokens": num_tokens})
                    assert answer.text == wanted[num_tokens]

            async with asyncio.TaskGroup() as group:
                for num_tokens in lengths * 4:
                    group.create_task(keep_asking(num_tokens))
                await eventually(lambda: _none_unless_running(client, "decode-1"))
                ended = await run("drain", "decode-1", "--url", url, "--timeout-s", "0")
                is_cut.set()
            assert ended.code == 1
            assert re.search(
                r"^✓ time is over: .*[2-9] requests still ran \([2-9] running.*\): cut here",
                ended.stdout,
                re.M,
            )
            await said(serving, "^decode-1 was drained and has ended")


async def test_only_operators_may_order(llama: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    tenant = (await run("key", "create", str(keys), "one")).stdout
    text = re.search(r"ndi-\S+", tenant)
    assert text is not None
    async with part("proxy", "--port=0", f"--api-keys={keys}") as proxy:
        for arguments in (("drain", "w"), ("role", "w", "prefill")):
            ended = await run(*arguments, "--url", proxy.url, environ={"KEY_NEURON_DI": text[0]})
            assert ended.code == 1
            assert ended.stderr == (
                f"neuron-di: {proxy.url} wants an operator's API key for this\n"
            )
            ended = await run(*arguments, "--url", proxy.url)
            assert (
                ended.stderr
                == f"neuron-di: {proxy.url} wants an API key: set KEY_NEURON_DI, or give --key\n"
            )


async def _workers(client: Client) -> list[dict]:
    workers: list[dict] = (await client.get("/status"))["workers"]
    return workers


async def _pid_of(client: Client, worker: str) -> int:
    records = [each["record"] for each in await _workers(client)]
    pid: int = next(record["pid"] for record in records if record["worker_id"] == worker)
    return pid


async def _none_unless(client: Client, num_workers: int) -> bool | None:
    states = [each["record"]["state"] for each in await _workers(client)]
    return True if states == ["ready"] * num_workers else None


async def _none_unless_running(client: Client, worker: str) -> bool | None:
    return True if (await client.load())[worker]["num_running"] >= 2 else None


async def _park(prefill: Part) -> asyncio.StreamWriter:
    """Open a prefill leg, and no decode leg. Its KV is parked when this returns."""
    host, port = prefill.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    leg = PrefillLeg(
        request_id=RequestId("parked"),
        attempt=0,
        endpoint="completions",
        prompt=msgspec.Raw(b"[5,6,7,8,9]"),
        sampling=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        timeout_s=60.0,
    )
    writer.write(MAGIC + bytes(encode_frame(OpenLeg(0, "prefill", encode_json(leg)))))
    frames = FrameReader(FROM_WORKER_BYTES_MAX)
    async with asyncio.timeout(30):
        while True:
            for payload in frames.feed(await reader.read(65536)):
                events = [event for _, event in told_decoder.decode(payload).events]
                if any(isinstance(event, Parked) for event in events):
                    return writer
