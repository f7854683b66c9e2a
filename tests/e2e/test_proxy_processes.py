"""`--processes`: one port, several processes, one set of answers about all of them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile

import aiohttp
import psutil
import pytest
from openai_kit import DEADLINE_S, eventually
from process_kit import children_of, command, part, said

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 24


async def fetch(url, path, **fields):
    """Over a connection of its own, which the system gives to any of the processes."""
    async with aiohttp.ClientSession() as session:
        method = "POST" if fields else "GET"
        async with session.request(method, url + path, json=fields or None) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, text, json.loads(text) if is_json else None


async def statuses_by_pid(url):
    """What each process says, asked until both have been."""
    found = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < 2:
            status, _, report = await fetch(url, "/status")
            assert status == 200
            found[report["proxy"]["pid"]] = report
    return found


async def test_two_processes_share_the_port_the_workers_and_the_answers(llama):
    async with (
        part("proxy", "--port", "0", "--processes", "2") as proxy,
        part("worker", str(llama), "--role=both", f"--registry={proxy.registry}", "--threads=1"),
    ):
        (child,) = children_of(proxy.process.pid)

        async def both_know_the_worker():
            reports = (await statuses_by_pid(proxy.url)).values()
            return all(each["workers"] for each in reports) or None

        await eventually(both_know_the_worker)
        await said(proxy.process, r"process=proxy-1 .*event=worker_up")
        reports = await statuses_by_pid(proxy.url)
        assert set(reports) == {proxy.process.pid, child.pid}
        for pid, report in reports.items():
            (sibling,) = report["siblings"]
            assert {pid, sibling["pid"]} == set(reports)

        answers = await asyncio.gather(
            *(
                fetch(proxy.url, "/v1/completions", model=llama.name, prompt="a", max_tokens=2)
                for _ in range(NUM_REQUESTS)
            )
        )
        assert {status for status, _, _ in answers} == {200}
        for _, _, answer in answers:
            status, _, receipt = await fetch(proxy.url, f"/v1/receipts/{answer['id']}")
            assert (status, receipt["num_generated"]) == (200, 2)
        reports = await statuses_by_pid(proxy.url)
        taken = [report["proxy"]["num_admitted"] for report in reports.values()]
        assert sum(taken) == NUM_REQUESTS
        assert all(taken)  # the system gave some to each
        _, metrics, _ = await fetch(proxy.url, "/metrics")
        counted = [
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("neuron_di_requests_total{")
        ]
        assert sum(counted) == NUM_REQUESTS

        os.kill(child.pid, signal.SIGKILL)

        async def is_back():
            (again,) = children_of(proxy.process.pid) or (child,)
            return None if again.pid == child.pid else again

        again = await eventually(is_back)
        await eventually(both_know_the_worker)
        assert set(await statuses_by_pid(proxy.url)) == {proxy.process.pid, again.pid}

        proxy.process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            assert await proxy.process.wait() == 0
        assert children_of(proxy.process.pid) == []


async def test_a_process_that_lost_the_first_one_leaves_the_port_and_then_ends(llama):
    words = ("proxy", "--port", str(free_port()), "--processes", "2")
    async with (
        part(*words) as proxy,
        part(
            "worker", str(llama), "--role=both", f"--registry={proxy.registry}", "--threads=1"
        ) as worker,
        aiohttp.ClientSession() as session,
    ):
        (sibling,) = children_of(proxy.process.pid)

        async def serves():
            return (await fetch(proxy.url, "/ready"))[0] == 200 or None

        await eventually(serves)
        os.kill(worker.process.pid, signal.SIGSTOP)
        body = {"model": llama.name, "prompt": "a", "max_tokens": 2}
        asked = [
            asyncio.create_task(session.post(proxy.url + "/v1/completions", json=body))
            for _ in range(NUM_REQUESTS)
        ]

        async def both_run_some():
            reports = (await statuses_by_pid(proxy.url)).values()
            running = [report["proxy"]["num_running"] for report in reports]
            return (sum(running) == NUM_REQUESTS and all(running)) or None

        await eventually(both_run_some)
        proxy.process.kill()

        async def has_left_the_port():
            try:
                socket.create_connection(("127.0.0.1", int(words[2])), 5).close()
            except ConnectionRefusedError:
                return True
            return None

        await eventually(has_left_the_port)
        assert sibling.is_running()
        os.kill(worker.process.pid, signal.SIGCONT)
        await asyncio.gather(*asked, return_exceptions=True)

        async def has_ended():
            return not psutil.pid_exists(sibling.pid) or None

        await eventually(has_ended)
        async with part(*words) as successor:
            assert successor.url == proxy.url
            folder = f"neuron-di-proxy-{proxy.process.pid}-"
            assert not [name for name in os.listdir(tempfile.gettempdir()) if folder in name]


async def test_a_second_signal_ends_every_process_of_the_proxy(llama):
    words = ("serve", str(llama), "--combined", "--port=0", "--threads=1", "--processes=2")
    async with command(*words) as serving:
        url = (await said(serving, r"^serving \S+ at (http://\S+)/v1$"))[1]
        everybody = psutil.Process(serving.pid).children(recursive=True)
        (worker,) = (each for each in everybody if "worker" in each.cmdline())
        worker.suspend()
        async with aiohttp.ClientSession() as session:
            body = {"model": llama.name, "prompt": "a", "max_tokens": 2}
            asked = [
                asyncio.create_task(session.post(url + "/v1/completions", json=body))
                for _ in range(NUM_REQUESTS)
            ]

            async def all_run():
                reports = (await statuses_by_pid(url)).values()
                running = sum(report["proxy"]["num_running"] for report in reports)
                return running == NUM_REQUESTS or None

            await eventually(all_run)
            serving.send_signal(signal.SIGINT)
            await said(serving, "draining")
            serving.send_signal(signal.SIGINT)
            async with asyncio.timeout(DEADLINE_S):
                assert await serving.wait() == 130
                _, left = await asyncio.to_thread(psutil.wait_procs, everybody, 5)
            assert left == []
            await asyncio.gather(*asked, return_exceptions=True)


@contextlib.asynccontextmanager
async def asgi_server(server, environ, log):
    """The application in this server, started as its users start it."""
    port = free_port()
    address = {"uvicorn": ("--port", str(port)), "hypercorn": ("--bind", f"127.0.0.1:{port}")}
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", server, "neuron_di_proxy.asgi:app", *address[server]),
            env=psutil.Process().environ() | environ,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=file,
        )
    try:
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def free_port():
    """Below the range that the system takes ports from for outgoing connections."""
    for port in range(21_000, 32_768):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@pytest.mark.parametrize("server", ["hypercorn", "uvicorn"])
async def test_another_asgi_server_serves_the_same(llama, server, tmp_path):
    log = tmp_path / "log"
    async with part("worker", str(llama), "--role", "both", "--threads", "1") as worker:
        environ = {"NEURON_DI_PREFILL_URLS": worker.url, "NEURON_DI_DECODE_URLS": worker.url}
        async with asgi_server(server, environ, log) as url:

            async def serves():
                try:
                    return (await fetch(url, "/ready"))[0] == 200 or None
                except aiohttp.ClientConnectionError:
                    return None

            await eventually(serves)
            # With logprobs a token that is half a character has an event, too.
            wanted = {"prompt": "a", "max_tokens": 3, "logprobs": 0, "stream": True}
            status, text, _ = await fetch(url, "/v1/completions", model=llama.name, **wanted)
            assert (status, text.count("data: ")) == (200, 5)
            assert text.endswith("data: [DONE]\n\n")
    assert "no_keys" in log.read_text(), "where it listens is not known"
