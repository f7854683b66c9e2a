"""Proxies and workers that find each other through etcd, as real processes."""

import asyncio
import json
import os
import sys

import aiohttp
import psutil
import pytest
from etcd.etcd_kit import PASSWORD, require_etcd, running_etcd
from openai_kit import DEADLINE_S, Client, eventually
from process_kit import children_of, command, part, run, said, session_of_many

from neuron_di.child import Child, end
from neuron_di.clock import Deadline
from neuron_di.config import (
    EngineOptions,
    EtcdOptions,
    LogOptions,
    ServeOptions,
    WorkerOptions,
    flags_of,
)
from neuron_di.serve import Fleet

pytestmark = pytest.mark.e2e

ONE_THREAD = ("--threads=1", "--log-level=info")


async def status_of(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as answer:
        return json.loads(await answer.text())


async def sees(url, num_workers):
    async def look():
        status = await status_of(url)
        return len(status["workers"]) == num_workers or None

    async with asyncio.timeout(DEADLINE_S):
        await eventually(look)


def etcds_below(pid):
    processes = psutil.Process(pid).children(recursive=True)
    return [each for each in processes if each.name() == "etcd"]


async def test_several_proxies_share_the_workers_in_etcd(llama):
    async with running_etcd() as etcd:
        there = f"--etcd={','.join(etcd.addresses)}"
        async with (
            part("proxy", "--port=0", there) as one,
            part("proxy", "--port=0", "--processes=2", there) as two,
        ):
            async with part("worker", str(llama), "--role=both", there, *ONE_THREAD):
                for proxy in (one, two):
                    await sees(proxy.url, 1)
                    async with session_of_many() as session:
                        answer = await Client(session, proxy.url, llama.name).ask("a", max_tokens=2)
                        assert answer.usage["completion_tokens"] == 2
                keys = etcd.ctl("get", "--prefix", "--keys-only", "/").split()
                assert [key.rpartition("/")[0] for key in keys] == [
                    "/neuron-di/workers/both/127.0.0.1"
                ]
            # It withdrew: no proxy waits for the end of a lease.
            for proxy in (one, two):
                await sees(proxy.url, 0)


async def test_a_process_of_a_proxy_that_starts_again_without_etcd_serves(llama):
    async with running_etcd() as etcd:
        there = f"--etcd={','.join(etcd.addresses)}"
        async with (
            part("proxy", "--port=0", "--processes=2", there) as proxy,
            part("worker", str(llama), "--role=both", there, *ONE_THREAD),
        ):
            (sibling,) = children_of(proxy.process.pid)
            await all_serve(proxy.url, {sibling.pid, proxy.process.pid})
            etcd.members[0].kill()
            sibling.kill()

            async def is_back():
                found = children_of(proxy.process.pid)
                return found[0] if found and found[0].pid != sibling.pid else None

            again = await eventually(is_back)
            await all_serve(proxy.url, {again.pid, proxy.process.pid})


async def all_serve(url, pids):
    """Until each of these processes of a proxy knows workers; a connection leads to any of them."""
    serving = set()
    async with asyncio.timeout(DEADLINE_S):
        while not pids <= serving:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{url}/status") as answer:
                    status = json.loads(await answer.text())
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        serving.add(status["proxy"]["pid"])
            await asyncio.sleep(0.01)


async def test_a_worker_tells_its_launcher_why_etcd_does_not_take_it(llama, tmp_path):
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    heard = asyncio.Queue()
    async with running_etcd() as etcd:
        etcd.enable_users()
        etcd.ctl("role", "add", "later")
        etcd.ctl("role", "grant-permission", "later", "--prefix=true", "read", "/neuron-di/")
        etcd.ctl("user", "grant-role", "nobody", "later")
        options = WorkerOptions(
            model=str(llama),
            role="both",
            parent_pid=os.getpid(),
            engine=EngineOptions(threads=1),
            etcd=EtcdOptions(
                etcd=tuple(etcd.addresses),
                etcd_user="nobody",
                etcd_password_file=str(password),
            ),
        )
        words = [sys.executable, "-m", "neuron_di", "worker", *flags_of(options)]
        child = Child("both-0", lambda: words, on_said=lambda _, report: heard.put_nowait(report))
        try:
            await child.start(Deadline.after(DEADLINE_S), lambda _name, _report: None)
            assert "permission denied" in (await unannounced(heard)).message
            etcd.ctl(
                "role", "grant-permission", "later", "--prefix=true", "readwrite", "/neuron-di/"
            )
            assert (await unannounced(heard)).message == ""
        finally:
            await end([child], DEADLINE_S)


async def unannounced(heard):
    async with asyncio.timeout(DEADLINE_S):
        while (report := await heard.get()).event != "unannounced":
            pass
    return report


async def test_auto_starts_an_etcd_for_serve_and_ends_it(llama):
    require_etcd()
    options = ServeOptions(
        model=str(llama),
        combined=True,
        port=0,
        etcd=EtcdOptions(etcd=("auto",)),
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="warning"),
    )
    async with Fleet(options) as fleet, session_of_many() as session:
        (etcd,) = etcds_below(fleet.pids()["proxy"])
        answer = await Client(session, fleet.url, fleet.model_name).ask("a", max_tokens=2)
        assert answer.usage["completion_tokens"] == 2
    assert not etcd.is_running()


async def test_auto_for_a_proxy_says_where_etcd_is():
    require_etcd()
    async with command("proxy", "--port=0", "--etcd=auto", "--processes=2") as process:
        ready = await said(process, r"event=ready .*url=\S+ etcd=(\S+)")
        (etcd,) = etcds_below(process.pid)
        assert f"--listen-client-urls=http://{ready[1]}" in etcd.cmdline()
        (sibling,) = children_of(process.pid)
        assert f"--etcd={ready[1]}" in sibling.cmdline()
        process.terminate()
        assert await process.wait() == 0
        assert not etcd.is_running()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("proxy", "--etcd=a:1", "--prefill-urls=http://a:1"), "not both"),
        (("proxy", "--etcd=a:1", "--etcd-ca=/no/such/file"), "cannot read --etcd-ca /no"),
    ],
)
async def test_what_cannot_work_ends_with_2(flags, words):
    ended = await run(*flags, "--port=0")
    assert ended.code == 2
    assert words in ended.stderr


async def test_serve_with_keys_joins_an_etcd_that_others_have(llama, tmp_path):
    """Only who has a key hears from its proxy which workers are there; it serves all the same."""
    keys = tmp_path / "keys.toml"
    key = (await run("key", "create", str(keys), "alice")).stdout.strip()
    async with running_etcd() as etcd:
        flags = ("--combined", "--port=0", f"--etcd={','.join(etcd.addresses)}", "--threads=1")
        async with command("serve", str(llama), f"--api-keys={keys}", *flags) as serving:
            url = (await said(serving, r"serving \S+ at (http://\S+)/v1$"))[1]
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": llama.name, "prompt": "a", "max_tokens": 2}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
            ):
                assert answer.status == 200
                assert (await answer.json())["usage"]["completion_tokens"] == 2
            serving.terminate()
            assert await serving.wait() == 0
