"""KV by each transfer engine that a user can ask for: the same text, and said by what and why."""

import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chaos.fault_proxy import free_ports
from openai_kit import Answer, Client, eventually, gather
from process_kit import part, run, session_of_many

from neuron_di.config import (
    EngineOptions,
    HandOverOptions,
    LogOptions,
    ServeOptions,
    TransferOptions,
)
from neuron_di.llm import LLM
from neuron_di.serve import Fleet
from neuron_di.wire import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

MAKE_CERTIFICATES = Path(__file__).parents[2] / "examples/certificates/make_certificates.sh"
NUM_TOKENS = 16
PROMPTS = [
    "Once upon a time",
    "The cat sat on the mat. " * 9,  # several blocks
    "One day, a little fox went to the river. It was a warm day, and the water was blue.",
]
APART = ("--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture(scope="module")
def expected(tiny_tales: Path) -> list[str]:
    """What one process makes of the prompts."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tiny_tales), threads=1) as llm:
        return [generation.text for generation in llm.generate(PROMPTS, sampling)]


@asynccontextmanager
async def serving(folder: Path, **transfer: Any) -> AsyncIterator[Client]:
    """1P1D; a prompt's KV goes at once, not layer by layer."""
    options = ServeOptions(
        model=str(folder),
        port=0,
        hand_over=HandOverOptions(stream_layers="off"),
        kv_transfer=TransferOptions(**transfer),
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="error"),
    )
    async with session_of_many() as session, Fleet(options) as fleet:
        yield Client(session, fleet.url, fleet.model_name)


async def answers_of(client: Client) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Of all prompts, with their receipts. Nothing is left of them."""
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = await gather(*(client.ask(prompt, **params) for prompt in PROMPTS))
    receipts = [await client.receipt(answer.answer_id) for answer in answers]
    load = await client.until_idle()
    assert not any(status["num_kv_mismatched"] for status in load.values())
    return answers, receipts


async def check(client: Client, expected: list[str], link: str, form: str) -> None:
    answers, receipts = await answers_of(client)
    assert [answer.text for answer in answers] == expected
    for receipt in receipts:
        assert (receipt["link"], receipt["form"], receipt["attempts"][0]["code"]) == (
            link,
            form,
            None,
        )
        assert (receipt["kv_bytes"] == 0) == (link == "handover")
        assert receipt["decode"]["kv_blocks"] > 0


async def check_reason(client: Client, link: str, reason: str, verdicts: str) -> None:
    """Status says it to operators, receipt and metrics in codes to anybody."""
    assert f"decode-0 takes KV from prefill-0 by {link} ({reason})\n" in await shown(client)
    (lane,) = (await client.load())["decode-0"]["lanes"]
    assert (lane["peer"], lane["engine"]) == ("prefill-0", link)
    assert (lane["reason"], lane["verdicts"]) == (reason, verdicts)
    _, receipts = await answers_of(client)
    assert {(each["link"], each["link_reason"]) for each in receipts} == {(link, verdicts)}
    said = await eventually(lambda: _lane_metric(client))  # workers tell it once a second
    expected = {"worker": "decode-0", "peer": "prefill-0", "engine": link, "reason": verdicts}
    assert expected.items() <= said.items()


async def shown(client: Client) -> str:
    """What `neuron-di status` prints."""
    report = await run("status", "--url", client.url)
    assert report.code == 0, report.stderr
    return report.stdout


@pytest.mark.parametrize("engine", ["shm", "tcp", "nixl", "auto"])
async def test_each_engine_gives_the_same_text(
    tiny_tales: Path, expected: list[str], engine: str
) -> None:
    if engine == "nixl" and find_spec("nixl_cu12") is None:
        pytest.skip("the package nixl-cu12 is not installed")
    link, form = ("handover", "handed_over") if engine == "auto" else (engine, "direct")
    async with serving(tiny_tales, transfer=(engine,)) as client:
        await check(client, expected, link, form)
        await check_reason(client, link, f"{link}: chosen", f"{link}: chosen")


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, one of them good for either end."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path_factory.mktemp("lanes") / "pem"
    subprocess.run(
        ["sh", str(MAKE_CERTIFICATES), str(folder), "127.0.0.1"], check=True, capture_output=True
    )
    return folder


async def test_tcp_with_tls_over_two_streams(
    tiny_tales: Path, expected: list[str], pem: Path
) -> None:
    (port,) = free_ports(1)
    files = {
        "transfer_tls_cert": str(pem / "server.pem"),
        "transfer_tls_key": str(pem / "server.key"),
        "transfer_tls_ca": str(pem / "ca.pem"),
    }
    async with serving(
        tiny_tales, transfer=("tcp",), transfer_port=port, transfer_streams=2, **files
    ) as client:
        await check(client, expected, "tcp", "direct")
        # Whoever connects there is shown the certificate, and no byte before it.
        there = ssl.get_server_certificate(("127.0.0.1", port), timeout=10)
        assert there.strip() in (pem / "server.pem").read_text()
        await check(client, expected, "tcp", "direct")  # a stranger's visit harms nobody


@asynccontextmanager
async def pair(
    folder: Path,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    decode_within: Sequence[str] = (),
) -> AsyncIterator[Client]:
    """A proxy and two workers, each started alone with flags of its own, and announced."""
    async with part("proxy", "--port=0") as proxy:
        common = ("worker", str(folder), "--model-name=m", "--threads=1", "--stream-layers=off")
        common = (*common, f"--registry={proxy.registry}")
        one = ("--role=prefill", "--worker-id=prefill-0", *prefill)
        other = ("--role=decode", "--worker-id=decode-0", *decode)
        async with (
            part(*common, *one),
            part(*common, *other, within=decode_within),
            session_of_many() as session,
        ):
            client = Client(session, proxy.url, "m")
            await eventually(lambda: _true_if_known(client, 2))
            yield client


@pytest.mark.parametrize(("prefill", "decode"), [(16, 8), (4, 24)])
async def test_another_block_size_at_each_end(
    tiny_tales: Path, expected: list[str], prefill: int, decode: int
) -> None:
    sizes = (f"--block-size={prefill}",), (f"--block-size={decode}",)
    async with pair(tiny_tales, *sizes) as client:
        await check(client, expected, "shm", "landed")


async def test_kv_of_another_number_format(tiny_tales: Path, expected: list[str]) -> None:
    """The first token is prefill's, in float32; what bfloat16 makes of the rest is its own."""
    kinds = ("--kv-convert", "--dtype=float32"), ("--kv-convert", "--dtype=bfloat16")
    async with pair(tiny_tales, *kinds) as client:
        answers, receipts = await answers_of(client)
        for answer, text, receipt in zip(answers, expected, receipts, strict=True):
            assert answer.usage["completion_tokens"] == NUM_TOKENS
            assert answer.labels[0]
            assert text.startswith(answer.labels[0])
            assert (receipt["link"], receipt["form"]) == ("shm", "landed")
            assert receipt["kv_bytes"] > 0


async def test_formats_that_one_end_does_not_convert_are_no_pair(tiny_tales: Path) -> None:
    kinds = ("--dtype=float32",), ("--kv-convert", "--dtype=bfloat16")
    async with pair(tiny_tales, *kinds) as client:
        assert (await client.get("/health"))["status"] == "unavailable"
        assert "KV layout" in await shown(client)


async def test_what_only_one_end_offers_is_left_out(tiny_tales: Path, expected: list[str]) -> None:
    async with pair(tiny_tales, ["--transfer=tcp"], ["--transfer=shm,tcp"]) as client:
        await check(client, expected, "tcp", "direct")
        assert "by tcp (shm: not offered by the peer; tcp: chosen)" in await shown(client)


@pytest.fixture(scope="module")
def apart() -> list[str]:
    """A command that runs another where it sees none of our processes."""
    command = [shutil.which("unshare") or "", *APART]
    if not command[0] or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no process namespaces here")
    return command


async def test_memory_that_cannot_be_mapped_goes_by_tcp(
    tiny_tales: Path, expected: list[str], apart: list[str]
) -> None:
    both = ["--transfer=shm,tcp"]
    async with pair(tiny_tales, both, both, decode_within=apart) as client:
        await check(client, expected, "tcp", "direct")
        reason = "shm: the peer is on another machine, in another container or of another user"
        reason, verdicts = f"{reason}; tcp: chosen", "shm: peer_refused; tcp: chosen"
        await check_reason(client, "tcp", reason, verdicts)


async def _lane_metric(client: Client) -> dict[str, str] | None:
    """The labels of the only lane that /metrics shows; None: it shows none yet."""
    async with client.session.get(client.url + "/metrics") as response:
        text = await response.text()
    found = re.findall(r"^neuron_di_worker_lane\{(.*)\} 1\.0$", text, re.MULTILINE)
    if not found:
        return None
    (labels,) = found
    return dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))


async def _true_if_known(client: Client, num: int) -> bool | None:
    """Whether the proxy has heard of so many workers, and from them."""
    workers = (await client.get("/status"))["workers"]
    return True if sum(each["status"] is not None for each in workers) == num else None
