"""`neuron-di serve` and `neuron-di status` as they are typed."""

import asyncio
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from openai_kit import Answer, Client, Refused, eventually
from process_kit import children_of, command, run, said, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_serve_until_ctrl_c(llama: Path) -> None:
    """It says where it serves; a stream that runs at Ctrl-C is finished; then all is gone."""
    async with command("serve", str(llama), "--port=0", "--threads=1") as serving:
        url = (await said(serving, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        workers = (await said(serving, r"^  (proxy .*)$"))[1]
        assert re.fullmatch(
            r"proxy \(pid \d+\), prefill-0 \(pid \d+\), decode-0 \(pid \d+\)", workers
        )
        await _check_status(url, [int(pid) for pid in re.findall(r"pid (\d+)", workers)])

        async with session_of_many() as session:
            client = Client(session, url, "tiny-llama")
            params = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
            async with client.post("def main(", **params) as response:
                body = await response.content.readline()
                serving.send_signal(signal.SIGINT)
                await said(serving, "draining")
                body += await response.read()
        events = body.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert len(events) == 1500 + 2
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"

        stdout, stderr = await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 0
        assert stdout == b""
        assert b"Traceback" not in stderr
        assert children_of(serving.pid) == []


async def test_children_end_with_a_launcher_that_is_killed(llama: Path) -> None:
    async with command("serve", str(llama), "--combined", "--port=0", "--threads=1") as serving:
        await said(serving, r"serving tiny-llama at")
        assert len(children_of(serving.pid)) == 2
        serving.kill()
        await serving.wait()

        async def all_gone() -> bool | None:
            return True if children_of(serving.pid) == [] else None

        await eventually(all_gone)


async def test_a_worker_that_ends_is_started_again(llama: Path, tmp_path: Path) -> None:
    """Under its name and with its options; the terminal and the log say so.

    One that refuses to start five times in a row, each after a longer wait, ends everything.
    """
    folder = tmp_path / "tiny"
    shutil.copytree(llama, folder)
    async with command("serve", str(folder), "--port=0", "--threads=1") as serving:
        url = (await said(serving, r"serving tiny at (http://\S+)/v1$"))[1]
        pids = await _pids(url)
        os.kill(pids["decode-0"], signal.SIGKILL)
        words = "decode-0 was ended by signal 9"
        await said(serving, f'event=child_ended child=decode-0 reason="{words}" restart_in_s=0.2')
        await said(serving, f"^{words}; starting it again in 0.2 s$")
        pid = int((await said(serving, r"^decode-0 is back \(pid (\d+)\)$"))[1])
        assert pid != pids["decode-0"]
        async with session_of_many() as session:
            client = Client(session, url, "tiny")
            answer = await eventually(lambda: _answer_or_none(client))
            receipt = await client.receipt(answer.answer_id)
        assert receipt["decode"]["worker_id"] == "decode-0"
        assert receipt["decode"]["pid"] == pid
        assert len(children_of(serving.pid)) == 3

        (folder / "config.json").unlink()
        os.kill(pids["prefill-0"], signal.SIGKILL)
        for wait_s in ("0.2", "0.4", "0.8", "1.6", "3.2"):
            await said(serving, rf"^prefill-0.*; starting it again in {wait_s} s$")
        await said(serving, r"^prefill-0: .*config\.json.*; stopping$")
        await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 1
        assert children_of(serving.pid) == []


async def test_without_its_proxy_it_ends(llama: Path) -> None:
    async with command("serve", str(llama), "--combined", "--port=0", "--threads=1") as serving:
        url = (await said(serving, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        os.kill((await _pids(url))["proxy"], signal.SIGKILL)
        words = "proxy was ended by signal 9"
        await said(serving, f'level=error .*event=fleet_lost reason="{words}"')
        await said(serving, f"^{words}; stopping$")
        await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 1
        assert children_of(serving.pid) == []


async def test_a_second_ctrl_c_does_not_wait_for_the_drain(llama: Path) -> None:
    async with command("serve", str(llama), "--port=0", "--threads=1") as serving:
        url = (await said(serving, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        prefill_pid = (await _pids(url))["prefill-0"]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-llama")
            params = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
            async with client.post("def main(", **params) as response:
                await response.content.readline()
                os.kill(prefill_pid, signal.SIGSTOP)  # it would not end when it is asked to
                serving.send_signal(signal.SIGINT)
                await said(serving, "draining")
                serving.send_signal(signal.SIGINT)
                _, stderr = await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 130
        assert b"Traceback" not in stderr
        assert b"starting it again" not in stderr
        assert children_of(serving.pid) == []


async def test_sigint_while_it_starts(llama: Path) -> None:
    async with command("serve", str(llama), "--port=0", "--threads=1") as serving:

        async def workers_started() -> bool | None:
            return True if len(children_of(serving.pid)) == 3 else None

        await eventually(workers_started)
        serving.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 0
        assert b"Traceback" not in stderr
        assert children_of(serving.pid) == []


async def test_the_program_alone_says_what_it_can_do() -> None:
    ended = await run()
    assert (ended.code, ended.stdout) == (2, "")
    assert "serve" in ended.stderr
    assert "COMMAND" in ended.stderr


async def test_status_of_nobody() -> None:
    ended = await run("status", "--url", "http://127.0.0.1:1")
    assert ended.code == 1
    assert ended.stderr.startswith("neuron-di: no proxy answers at http://127.0.0.1:1: ")
    assert len(ended.stderr.splitlines()) == 1


async def _pids(url: str) -> dict[str, int]:
    """Process ids by name, as the proxy knows them."""
    async with session_of_many() as session:
        report = await Client(session, url, "").get("/status")
    pids = {each["record"]["worker_id"]: each["record"]["pid"] for each in report["workers"]}
    return {"proxy": report["proxy"]["pid"]} | pids


async def _answer_or_none(client: Client) -> Answer | None:
    try:
        return await client.ask("hello", max_tokens=9, ignore_eos=True)
    except Refused:
        return None


async def _check_status(url: str, pids: list[int]) -> None:
    async with session_of_many() as session:
        await Client(session, url, "").until_tested(1)

    async def answered(*flags: str) -> str | None:
        """None where a worker was too busy to answer the proxy in time."""
        ended = await run("status", "--url", url, *flags, environ={"COLUMNS": "200"})
        return None if "did not answer in time" in ended.stdout else ended.stdout

    report = json.loads(await eventually(lambda: answered("--json")))
    records = {each["record"]["worker_id"]: each["record"] for each in report["workers"]}
    assert [report["proxy"]["pid"], records["prefill-0"]["pid"], records["decode-0"]["pid"]] == pids
    for each in report["workers"]:
        assert each["record"]["state"] == "ready"
        assert each["status"]["num_blocks_free"] == each["status"]["num_blocks"] > 0

    table = await eventually(answered)
    assert re.search(rf"^proxy {url} .*pid {pids[0]}\b.* serving\b", table)
    for role in ("prefill", "decode"):
        shown = rf"^{role}-0\s+{role}\s+ready\s+tiny-llama\s+[0-9a-f]+…\s+0/\d+\s+0%\s+\d+s\s+1$"
        assert re.search(shown, table, re.M), table
