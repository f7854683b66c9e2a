"""What keeps a server from starting on NeuronCores: cause and mend in a line, code 2, no process.

So far this has run on a simulator of libnrt only.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from neuron_kit import Host, has_compiler, simulated_host
from nrt_sim.build import library_path
from process_kit import said

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]

HOLD = """
import sys
from neuron_di_bindings.nrt import NrtRuntime, load_nrt
with NrtRuntime(load_nrt()) as runtime:
    runtime.init()
    print("has them", file=sys.stderr, flush=True)
    sys.stdin.read()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(tiny_tales: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """For which the model is compiled with one rank."""
    with simulated_host(tiny_tales, tmp_path_factory.mktemp("artifacts")) as host:
        ended = await host.compile("--tp=1")
        assert ended.code == 0, ended.stderr
        yield host


async def refusal(host: Host, *arguments: str) -> str:
    """What `neuron-di serve` says when it does not start. The runtime may have said more before."""
    ended = await host.run(*host.serve_arguments("--log-level=error", *arguments))
    *others, words = ended.stderr.splitlines()
    assert ended.code == 2, ended.stderr
    assert words.startswith("neuron-di: ")
    assert all(line.startswith("nrt_sim: ") for line in others), ended.stderr
    assert ended.stdout == ""
    return words


async def test_no_runtime_library(host: Host) -> None:
    words = await refusal(host.with_(NEURON_DI_LIBNRT="/nowhere/libnrt.so.1"))
    assert "/nowhere/libnrt.so.1" in words
    assert "aws-neuronx-runtime-lib" in words


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        ("0-2", "need 4 NeuronCores (prefill-0 2, decode-0 2) and may use 3 (0-2)"),
        (
            "30-33",
            "cores (does it have those of NEURON_RT_VISIBLE_CORES=30-33?): nrt_get_total_vnc_count",
        ),
        ("3-0", "NEURON_RT_VISIBLE_CORES=3-0 names no cores"),
    ],
    ids=["few", "absent", "none"],
)
async def test_cores_that_do_not_suffice(host: Host, cores: str, words: str) -> None:
    assert words in await refusal(host.with_(NEURON_RT_VISIBLE_CORES=cores), "--tp=2")


async def test_nothing_compiled_for_this_shape(host: Host) -> None:
    """It says what there is instead, and the command that makes what is missing."""
    words = await refusal(host, "--tp=2")
    assert "tp is 1, and 2 is wanted" in words
    assert f"neuron-di compile {host.model} --tp 2 --decode-batch 4" in words
    assert f"--neuron-artifacts {host.artifacts}" in words


async def test_cores_that_another_process_has(host: Host) -> None:
    async with holding(host, "1"):
        words = await refusal(host)
    assert "NeuronCores 1 cannot be taken" in words
    assert "NEURON_RT_VISIBLE_CORES" in words


async def test_send_and_receive_where_there_is_no_efa(host: Host) -> None:
    """Without --transfer nrt another way is taken."""
    words = await refusal(host.with_(NRT_SIM_INSTANCE="inf2.48xlarge"), "--transfer=nrt")
    assert "send and receive on core" in words
    assert "EFA" in words
    assert "--transfer shm,tcp" in words


@pytest.mark.parametrize(
    ("api", "name"),
    [(2, "nrt_kv_store_server.lock"), (3, f"nrt_kv_store_server_lock_uid_{os.getuid()}")],
)
async def test_a_bootstrap_lock_that_another_user_left_behind(
    host: Host, tmp_path: Path, api: int, name: str
) -> None:
    """The runtime cannot take it. What the runtime has in /tmp, the simulator has below its root;
    there no other test's process looks for it."""
    locks = tmp_path / "hosts" / "127.0.0.1" / "tmp"
    locks.mkdir(parents=True)
    lock = locks / name
    lock.touch(mode=0o600)
    if os.getuid() == 0:
        os.chown(lock, 65534, 65534)
    else:  # nobody may give a file away: it is closed to its owner, too
        lock.chmod(0)
    library = str(library_path(api))
    here = host.with_(NRT_SIM_ROOT=str(tmp_path), TMPDIR=str(locks), NEURON_DI_LIBNRT=library)
    words = await refusal(here, "--transfer=nrt")
    assert "does not open send and receive on core" in words
    assert f"a bootstrap lock file of another user, {lock}: " in words
    assert words.endswith("delete it")


@asynccontextmanager
async def holding(host: Host, cores: str) -> AsyncIterator[None]:
    """Another process has these cores meanwhile."""
    environ = psutil.Process().environ() | host.environ | {"NEURON_RT_VISIBLE_CORES": cores}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    try:
        await said(process, "has them")
        yield
    finally:
        await process.communicate(b"")  # the end of its input ends it
    assert process.returncode == 0
