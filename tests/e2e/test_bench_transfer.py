"""`neuron-di bench-transfer` as its users run it: on one host, and as two ends that meet."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai_kit import eventually
from process_kit import Ended, command, run

from neuron_di.transfer_bench import measure_transfers
from neuron_di.transfer_bench.flags import ENGINES, KEY_VARIABLE, READY_WORDS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SMALL = ("--pool-mib", "4", "--repeats", "2", "--verify", "--json")
SHAPES = ("--shape", "64KiB", "--shape", "100x4KiB")
NEEDS_MORE = ("nixl", "cuda_ipc")  # a package, a device
KEY = "a-key-of-this-test-and-no-other-one"


def figures_of(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended.stderr
    report = json.loads(ended.stdout)
    found: list[dict[str, Any]] = report["figures"]
    return found


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "auto"])
async def test_every_engine_moves_every_byte_between_two_processes(engine: str) -> None:
    ended = await run("bench-transfer", "--engine", engine, *SMALL, *SHAPES)
    if engine in NEEDS_MORE and ended.code == 2:
        assert f"{engine} does not work: config_error" in ended.stderr
        pytest.skip(ended.stderr.strip())
    small, paged = figures_of(ended)
    assert [each["shape"] for each in (small, paged)] == ["64KiB", "100x4KiB"]
    for each, num_bytes in ((small, 65_536), (paged, 409_600)):
        assert each["engine"] == engine
        assert each["num_bytes"] == num_bytes
        assert each["kv_bytes"] == (0 if engine == "handover" else num_bytes)
        assert (each["num_transfers"], each["num_verified"]) == (2, 2)
        assert each["ms_p50"] > 0
        assert each["memcpy_ms"] > 0
        assert each["set_up_ms"] > 0


async def test_engines_take_turns_and_auto_says_why_it_is_the_one() -> None:
    flags = ("--engine", "auto", "--engine", "shm", "--shape", "8x4KiB")
    chosen, shm = figures_of(await run("bench-transfer", *SMALL, *flags))
    assert f"{chosen['engine']}: chosen" in chosen["reason"]
    assert (shm["engine"], shm["reason"]) == ("shm", "")


async def test_without_json_there_is_a_table() -> None:
    ended = await run(
        "bench-transfer", "--engine", "shm", "--shape", "64KiB", "--pool-mib", "4", "--repeats", "1"
    )
    assert ended.code == 0, ended.stderr
    assert re.search(r"^64KiB +shm +[0-9.]+ ", ended.stdout, re.MULTILINE)
    assert "the first transfer of each row was verified" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--shape", "lots"), "a shape is like"),
        (("--repeats", "0"), "--repeats goes from 1"),
        (("--pool-mib", "0"), "--pool-mib goes from 1"),
        (("--pool-mib", "16385"), "--pool-mib goes from 1"),
        (("--shape", "100000x1GiB"), "is too large"),
        (("--connect", "nowhere"), "--connect is HOST:PORT"),
        (("--connect", "127.0.0.1:1"), "the serving end printed a key"),
        (("--serve", "--port", "70000"), "--port goes from 0"),
        (("--serve", "--host", "203.0.113.7"), "cannot listen on"),
        (("--serve", "--key-file", "/nowhere/at/all"), "cannot read --key-file"),
    ],
)
async def test_what_cannot_start_says_so_in_a_line(flags: tuple[str, ...], words: str) -> None:
    ended = await run("bench-transfer", *flags)
    assert ended.code == 2
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


async def test_two_ends_meet_and_the_key_is_good_for_one_run(tmp_path: Path) -> None:
    async with command("bench-transfer", "--serve") as serving:
        address, key = await heard(serving)
        assert KEY not in key
        key_file = tmp_path / "key"
        key_file.write_text(f"{key}\n")
        flags = ("--connect", address, "--engine", "shm", "--shape", "16x4KiB", *SMALL)

        wrong = await run("bench-transfer", *flags, environ={KEY_VARIABLE: KEY})
        assert wrong.code == 1
        assert "the serving end refused the key" in wrong.stderr
        assert "refused 127.0.0.1: the other end does not have the key" in await line_of(serving)

        right = await run("bench-transfer", *flags, "--key-file", str(key_file))
        (found,) = figures_of(right)
        assert (found["engine"], found["num_verified"]) == ("shm", 2)
        assert json.loads(right.stdout)["peer"] == address

        async with asyncio.timeout(30):
            assert await serving.wait() == 0
        again = await run("bench-transfer", *flags, environ={KEY_VARIABLE: key})
        assert again.code == 1
        assert f"nothing serves bench-transfer at {address}" in again.stderr


async def test_two_ends_over_tcp() -> None:
    async with command("bench-transfer", "--serve", environ={KEY_VARIABLE: KEY}) as serving:
        address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
        ended = await run(
            "bench-transfer", "--connect", address, "--engine", "tcp", *SMALL, *SHAPES,
            environ={KEY_VARIABLE: KEY},
        )  # fmt: skip
        assert [each["engine"] for each in figures_of(ended)] == ["tcp", "tcp"]
        async with asyncio.timeout(30):
            rest, _ = await serving.communicate()
        assert KEY.encode() not in rest


async def test_an_engine_that_does_not_work_between_two_ends_is_named() -> None:
    """They are two hosts to each other: no arena is theirs."""
    async with command("bench-transfer", "--serve", environ={KEY_VARIABLE: KEY}) as serving:
        address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
        ended = await run(
            "bench-transfer", "--connect", address, "--engine", "handover", "--shape", "4KiB",
            environ={KEY_VARIABLE: KEY},
        )  # fmt: skip
        assert ended.code in (1, 2)
        assert "handover does not work: " in ended.stderr


async def test_a_serving_end_that_dies_ends_the_run() -> None:
    async with command("bench-transfer", "--serve", environ={KEY_VARIABLE: KEY}) as serving:
        address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
        many = ("--repeats", "10000", "--shape", "4KiB", "--engine", "shm", "--pool-mib", "1")
        async with command(
            "bench-transfer", "--connect", address, *many, environ={KEY_VARIABLE: KEY}
        ) as measuring:
            await eventually(lambda: are_linked(serving.pid, measuring.pid))
            serving.kill()
            async with asyncio.timeout(60):
                _, stderr = await measuring.communicate()
    assert measuring.returncode == 1
    assert b"the other end of bench-transfer" in stderr


async def test_others_get_the_figures_themselves() -> None:
    report = await asyncio.to_thread(
        measure_transfers, ("shm",), ("64KiB",), repeats=1, pool_bytes=4 << 20
    )
    (found,) = report.figures
    assert (found.engine, found.num_verified) == ("shm", 1)


async def are_linked(*pids: int) -> bool | None:
    """Whether each has a connection now."""
    found = [psutil.Process(pid).net_connections("tcp") for pid in pids]
    return all(any(each.status == "ESTABLISHED" for each in those) for those in found) or None


async def heard(serving: asyncio.subprocess.Process) -> tuple[str, str]:
    """The address and the key that it prints."""
    address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
    return address, (await line_of(serving)).rpartition(" ")[2]


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()
