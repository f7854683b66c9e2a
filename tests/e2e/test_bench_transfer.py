"""`neuron-di bench-transfer` as its users run it: on one host, and as two ends that meet."""

import asyncio
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from contract.engine_kinds import KINDS
from contract.fake_cuda import WHY_NOT, library_path
from openai_kit import eventually
from process_kit import Ended, command, run

from neuron_di.transfer_bench import measure_transfers
from neuron_di.transfer_bench.flags import ENGINES, KEY_VARIABLE, READY_WORDS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

MAKE_CERTIFICATES = Path(__file__).parents[2] / "examples/certificates/make_certificates.sh"
SMALL = ("--pool-mib", "4", "--repeats", "2", "--verify", "--json")
SHAPES = ("--shape", "64KiB", "--shape", "100x4KiB")
NO_UCX = {"UCX_TLS": "shm,self"}  # neither notices the end of a peer: NIXL takes no such UCX
NO_LIBFABRIC = re.compile(
    r"NIXL's plugin LIBFABRIC \(libplugin_LIBFABRIC\.so\) cannot be loaded: it needs libfabric"
    r"|NIXL's LIBFABRIC backend cannot be started"
)
NO_CUDA = {"NEURON_DI_CUDART": "/nowhere/libcudart.so"}
KEY = "a-key-of-this-test-and-no-other-one"


def require_nixl() -> None:
    if find_spec("nixl_cu12") is None:
        pytest.skip("the package nixl-cu12 is not installed")


def figures_of(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended.stderr
    report = json.loads(ended.stdout)
    found: list[dict[str, Any]] = report["figures"]
    return found


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "auto"])
async def test_every_engine_moves_every_byte_between_two_processes(engine: str) -> None:
    environ = {}
    if engine == "nixl":
        require_nixl()
    if engine == "cuda_ipc":
        if WHY_NOT is not None:
            pytest.skip(WHY_NOT)
        environ["NEURON_DI_CUDART"] = str(library_path())  # the simulator
    ended = await run("bench-transfer", "--engine", engine, *SMALL, *SHAPES, environ=environ)
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


async def test_engines_that_share_no_pool_are_measured_one_after_the_other() -> None:
    require_nixl()
    flags = ("--engine", "nixl", "--engine", "handover", "--shape", "8x4KiB")
    ended = await run("bench-transfer", *SMALL, *flags)
    assert [each["engine"] for each in figures_of(ended)] == ["nixl", "handover"]


async def test_an_engine_that_is_not_there_takes_nobody_elses_figures_with_it() -> None:
    flags = ("--engine", "cuda_ipc", "--engine", "shm", *SHAPES)
    ended = await run("bench-transfer", *SMALL, *flags, environ=NO_CUDA)
    assert ended.code == 1
    report = json.loads(ended.stdout)
    assert [each["engine"] for each in report["figures"]] == ["shm", "shm"]
    assert [each["engine"] for each in report["failures"]] == ["cuda_ipc", "cuda_ipc"]
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("neuron-di: cuda_ipc does not work with 64KiB, 100x4KiB: ")
    assert "pip install '.[cuda]'" in line


async def test_a_failure_has_its_row_even_where_nothing_was_measured() -> None:
    ended = await run("bench-transfer", "--engine", "cuda_ipc", "--shape", "64KiB", environ=NO_CUDA)
    assert ended.code == 1
    assert re.search(r"^64KiB +cuda_ipc +failed ", ended.stdout, re.MULTILINE)
    assert "verified" not in ended.stdout
    assert "cuda_ipc does not work with 64KiB: " in ended.stderr


async def test_both_ends_are_told_what_moves_kv_beneath_nixl() -> None:
    """Where UCX cannot start, LIBFABRIC can, or NIXL says that it lacks what that needs."""
    require_nixl()
    flags = ("bench-transfer", "--engine=nixl", "--shape=64KiB", "--pool-mib=4", "--repeats=1")
    by_libfabric = await run(*flags, "--nixl-backend=LIBFABRIC", environ=NO_UCX)
    if KINDS["nixl over libfabric"].why_not is None:
        assert by_libfabric.code == 0, by_libfabric.stderr
    else:
        assert by_libfabric.code == 1
        assert NO_LIBFABRIC.search(by_libfabric.stderr)
    without_ucx = await run(*flags, "--nixl-backend=UCX", environ=NO_UCX)
    assert without_ucx.code == 1
    assert "NIXL's UCX backend cannot be started" in without_ucx.stderr
    by_ucx = await run(*flags, "--nixl-backend=UCX")
    assert by_ucx.code == 0, by_ucx.stderr


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
        (("--transfer-streams", "65"), "--transfer-streams goes from 1 to 64"),
        (("--transfer-tls-cert", "cert.pem"), "go together"),
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


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """Certificates, one of them good for either end."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path / "pem"
    subprocess.run(
        ["sh", str(MAKE_CERTIFICATES), str(folder), "127.0.0.1"], check=True, capture_output=True
    )
    return folder


async def test_tcp_with_tls_over_several_streams(pem: Path) -> None:
    flags = [
        f"--transfer-tls-cert={pem / 'server.pem'}",
        f"--transfer-tls-key={pem / 'server.key'}",
    ]
    flags += [f"--transfer-tls-ca={pem / 'ca.pem'}", "--transfer-streams=3"]
    small, paged = figures_of(await run("bench-transfer", "--engine=tcp", *SMALL, *SHAPES, *flags))
    assert (small["num_verified"], paged["num_verified"]) == (2, 2)

    # An end without TLS is not talked to.
    async with command("bench-transfer", "--serve", environ={KEY_VARIABLE: KEY}) as serving:
        address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
        plain = ("--connect", address, "--engine", "tcp", "--shape", "4KiB")
        ended = await run("bench-transfer", *plain, *flags, environ={KEY_VARIABLE: KEY})
    assert ended.code == 1
    assert "tcp does not work with 4KiB: " in ended.stderr
    assert "TLS" in ended.stderr


async def test_an_engine_that_does_not_work_between_two_ends_is_named() -> None:
    """They are two hosts to each other: no arena is theirs."""
    async with command("bench-transfer", "--serve", environ={KEY_VARIABLE: KEY}) as serving:
        address = (await line_of(serving)).removeprefix(READY_WORDS).strip()
        ended = await run(
            "bench-transfer", "--connect", address, "--engine", "handover", "--shape", "4KiB",
            environ={KEY_VARIABLE: KEY},
        )  # fmt: skip
        assert ended.code == 1
        assert "handover does not work with 4KiB: config_error: handover is for " in ended.stderr


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
