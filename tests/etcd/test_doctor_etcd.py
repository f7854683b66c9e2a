"""What the doctor says of etcd: real members, plain, with TLS, with users, gone and frozen."""

import asyncio
import contextlib
import json
import os
import shlex
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from etcd_kit import DEADLINE_S, PASSWORD, Etcd, certificates, fill, require_etcd, running_etcd

from neuron_di.config import EtcdOptions
from neuron_di.doctor.etcd_door import _skew_s, knock
from neuron_di.doctor.etcd_probe import _is_good
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.failures import NoSpace

NUM_KNOCKS = 12

Findings = list[dict[str, Any]]


async def doctor(*flags: str, code: int, **environ: str) -> Findings:
    """What `neuron-di doctor --only etcd` finds, and that it ends with this code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "neuron_di", "doctor", "--only", "etcd", "--json", *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environ,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode == code, (stdout.decode(), stderr.decode())
    found: Findings = json.loads(stdout)["findings"]
    return found


async def wait_for_no_leader(etcd: Etcd) -> None:
    async with asyncio.timeout(DEADLINE_S), EtcdClient(etcd.addresses[:1]) as client:
        while True:
            if "no leader" in " ".join((await client.status()).errors):
                return
            await asyncio.sleep(0.1)


def names(findings: Findings) -> list[str]:
    return [f"{each['check']} {each['grade']}" for each in findings]


def tls_flags(user: str | None = "worker") -> list[str]:
    pem = certificates()
    flags = ["--etcd-ca", pem.path("ca.pem")]
    if user is not None:
        flags += ["--etcd-cert", pem.path(f"{user}.pem"), "--etcd-key", pem.path(f"{user}.key")]
    return flags


async def test_without_etcd_nothing_is_looked_at() -> None:
    assert names(await doctor(code=0)) == ["etcd.member skipped"]


async def test_members_are_told_one_by_one_and_a_write_leaves_nothing() -> None:
    async with running_etcd(num_members=3) as etcd:
        addresses = ",".join(etcd.addresses)
        findings = await doctor("--etcd", addresses, "--etcd-prefix", "/some/where", code=0)
        assert names(findings) == ["etcd.member ok"] * 3 + ["etcd.write ok"]
        assert [each["facts"]["address"] for each in findings[:3]] == etcd.addresses
        assert abs(findings[0]["facts"]["skew_s"]) <= 1
        assert findings[3]["says"].startswith("a key below /some/where was written")
        assert findings[3]["facts"]["write_ms"] > 0
        assert etcd.ctl("get", "", "--prefix", "--keys-only").strip() == ""
        assert etcd.ctl("lease", "list").split() == ["found", "0", "leases"]


async def test_a_member_that_is_gone_fails_and_the_others_are_used() -> None:
    async with running_etcd(num_members=3) as etcd:
        etcd.members[1].kill()
        etcd.ctl("--command-timeout=60s", "get", "x")  # perhaps another leader is chosen first
        findings = await doctor("--etcd", ",".join(etcd.addresses), code=1)
        assert names(findings) == [
            "etcd.member ok",
            "etcd.member failed",
            "etcd.member ok",
            "etcd.write ok",
        ]
        assert "nothing listens on that port" in findings[1]["says"]
        assert findings[1]["mend"].startswith("Start etcd")


async def test_most_members_gone_takes_no_writes() -> None:
    async with running_etcd(num_members=3) as etcd:
        for member in etcd.members[1:]:
            member.kill()
        await wait_for_no_leader(etcd)
        *_, alone, write = await doctor("--etcd", etcd.addresses[0], code=1)
        assert names([alone, write]) == ["etcd.member failed", "etcd.write failed"]
        assert write["mend"].startswith("Look whether more than half of its members run")


async def test_an_etcd_without_space_is_no_matter_of_passwords() -> None:
    async with (
        running_etcd(flags=("--quota-backend-bytes=1000000",)) as etcd,
        EtcdClient(etcd.addresses) as client,
    ):
        with pytest.raises(NoSpace):
            await fill(client)
        member, write = await doctor("--etcd", etcd.addresses[0], code=1)
        assert names([member, write]) == ["etcd.member failed", "etcd.write failed"]
        assert "alarm NOSPACE" in write["says"]
        assert "--auto-compaction-retention" in write["mend"]


async def test_a_frozen_etcd_is_given_up() -> None:
    async with running_etcd() as etcd:
        etcd.members[0].freeze()
        try:
            findings = await doctor("--etcd", etcd.addresses[0], code=1)
        finally:
            etcd.members[0].thaw()
        assert names(findings) == ["etcd.member failed"]
        assert "does not answer within 2 s" in findings[0]["says"]
        assert findings[0]["mend"].startswith("Look whether that process is stopped")


async def test_two_clusters_are_no_cluster() -> None:
    async with running_etcd() as one, running_etcd() as other:
        findings = await doctor("--etcd", f"{one.addresses[0]},{other.addresses[0]}", code=1)
        assert "etcd.clusters failed" in names(findings)


async def test_tls_is_said_by_what_is_wrong_with_it() -> None:
    async with running_etcd(tls=True) as etcd:
        (port,) = (member.port for member in etcd.members)
        address = etcd.addresses[0]
        well = await doctor("--etcd", address, *tls_flags(), code=0)
        assert names(well) == ["etcd.member ok", "etcd.write ok"]
        stranger = certificates().path("stranger.pem")
        for flags, words in (
            (["--etcd", address], "as etcd does without TLS where it asks for it"),
            (["--etcd", address, *tls_flags(None)], "it refuses our certificate"),
            (["--etcd", address, "--etcd-ca", stranger], "its certificate is refused"),
            (["--etcd", f"127.0.0.2:{port}", *tls_flags()], "nothing listens"),
        ):
            findings = await doctor(*flags, code=1)
            assert names(findings) == ["etcd.member failed"], flags
            assert words in findings[0]["says"]


async def test_a_certificate_of_ours_that_has_expired_may_be_renewed() -> None:
    async with running_etcd(tls=True) as etcd:
        (finding,) = await doctor("--etcd", etcd.addresses[0], *tls_flags("expired"), code=1)
        assert "it refuses our certificate" in finding["says"]
        assert "renew" in finding["mend"]


async def test_a_certificate_for_another_name_is_said_to_be() -> None:
    async with running_etcd(tls=True) as etcd:
        address = f"127.1:{etcd.members[0].port}"  # the same host, as its certificate does not say
        (finding,) = await doctor("--etcd", address, *tls_flags(), code=1)
        assert "its certificate is refused: hostname mismatch" in finding["says"]
        assert "have one made for 127.1" in finding["mend"]


async def test_an_etcd_without_tls_is_said_to_be() -> None:
    async with running_etcd() as etcd:
        findings = await doctor("--etcd", etcd.addresses[0], *tls_flags(None), code=1)
        assert names(findings) == ["etcd.member failed"]
        assert "hangs up on TLS" in findings[0]["says"]


def reasons(address: str, *pem: str) -> set[str]:
    """What is said of an address when it is asked often: who is first may differ."""
    paths = [certificates().path(name) for name in pem]
    options = EtcdOptions(
        etcd=(address,),
        etcd_ca=paths[0],
        etcd_cert=paths[1] if len(paths) > 1 else None,
        etcd_key=paths[2] if len(paths) > 1 else None,
    )
    return {knock(address, options).why for _ in range(NUM_KNOCKS)}


async def test_a_certificate_of_another_authority_is_said_to_be_refused_each_time() -> None:
    async with running_etcd(tls=True) as etcd:
        pem = ("ca.pem", "stranger.pem", "stranger.key")
        for why in await asyncio.to_thread(reasons, etcd.addresses[0], *pem):
            assert why.startswith("it refuses our certificate")


async def test_no_tls_is_said_to_be_none_each_time() -> None:
    async with running_etcd() as etcd:
        whys = await asyncio.to_thread(reasons, etcd.addresses[0], "ca.pem")
        assert whys == {"it hangs up on TLS, which --etcd-ca asks for"}


async def test_an_end_after_the_handshake_is_a_refusal() -> None:
    """As etcd looks where its alert is lost."""
    pem = certificates()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem.path("server.pem"), pem.path("server.key"))

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        (why,) = await asyncio.to_thread(reasons, f"127.0.0.1:{port}", "ca.pem")
    assert why.startswith("it refuses our certificate")


async def test_an_address_that_says_odd_things_hides_no_other() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        date = b"Tue, 14 Nov 2023 22:13:20 -99999999999999999999"
        writer.write(b"HTTP/1.1 200 OK\r\nDate: " + date + b"\r\n\r\n")
        writer.close()

    async with running_etcd() as etcd, await asyncio.start_server(say, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        flags = ("--etcd", f"127.0.0.1:{port},{etcd.addresses[0]}")
        findings = await doctor(*flags, code=1)
    assert names(findings) == ["etcd.member failed", "etcd.member ok", "etcd.write ok"]


async def test_an_address_that_says_a_letter_at_a_time_is_given_up() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.1)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        door = await asyncio.to_thread(knock, address, EtcdOptions(etcd=(address,)))
    assert door.why == "what answers there is no etcd"


async def test_an_etcd_of_our_own_says_what_it_lacks() -> None:
    """Few open files; it is installed."""
    require_etcd()
    words = "ulimit -n 24; exec " + shlex.join(
        [sys.executable, "-m", "neuron_di", "doctor", "--only", "etcd", "--json", "--etcd", "auto"]
    )
    process = await asyncio.create_subprocess_shell(words, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        stdout, _ = await process.communicate()
    first, last = json.loads(stdout)["findings"]
    assert names([first, last]) == ["etcd.program ok", "etcd.program failed"]
    assert "ulimit -n" in last["mend"]


async def test_users_and_what_they_may(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    async with running_etcd() as etcd:
        etcd.enable_users()
        etcd.ctl("role", "add", "reader")
        etcd.ctl("role", "grant-permission", "reader", "--prefix=true", "read", "/neuron-di/")
        etcd.ctl("user", "add", f"proxy:{PASSWORD}")
        etcd.ctl("user", "grant-role", "proxy", "reader")
        flags = ["--etcd", etcd.addresses[0], "--etcd-password-file", str(password)]
        findings = await doctor(*flags, "--etcd-user", "worker", code=0)
        assert names(findings) == ["etcd.member ok", "etcd.write ok"]
        findings = await doctor(*flags, "--etcd-user", "proxy", code=0)
        assert names(findings) == ["etcd.member ok", "etcd.write warning"]
        findings = await doctor(*flags, "--etcd-user", "nobody", code=1)
        assert names(findings) == ["etcd.member ok", "etcd.write failed"]
        assert "neither read nor write" in findings[1]["says"]
        password.write_text("wrong")
        password.chmod(0o644)
        findings = await doctor(*flags, "--etcd-user", "worker", code=1)
        assert names(findings)[0] == "etcd.secret warning"
        assert "failed" in names(findings)[1]
        assert "wrong" not in json.dumps(findings)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "it hangs up"),
        (b"SSH-2.0-x\r\n", "what answers there is no etcd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "what answers there is no etcd"),
    ],
)
async def test_what_is_no_etcd_is_said_to_be(answer: bytes, words: str) -> None:
    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (finding,) = await doctor("--etcd", f"127.0.0.1:{port}", code=1)
    assert finding["check"] == "etcd.member"
    assert words in finding["says"]
    assert "client port" in finding["mend"]


async def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    ca = str(tmp_path / "ca.pem")
    (finding,) = await doctor("--etcd", "127.0.0.1:2379", "--etcd-ca", ca, code=1)
    assert (finding["check"], finding["says"]) == ("etcd.options", f"{ca} is not in PEM form")


async def test_an_etcd_of_our_own_is_tried() -> None:
    require_etcd()
    findings = await doctor("--etcd", "auto", code=0)
    assert names(findings) == ["etcd.program ok", "etcd.member ok", "etcd.write ok"]


async def test_an_etcd_of_our_own_needs_the_program() -> None:
    (finding,) = await doctor("--etcd", "auto", code=1, PATH="/nowhere")
    assert (finding["check"], finding["grade"]) == ("etcd.program", "failed")


@pytest.mark.parametrize(
    ("version", "is_good"),
    [
        ("3.4.21", False),
        ("3.4.22", True),
        ("3.5.0", False),
        ("3.5.5", False),
        ("3.5.6", True),
        ("3.6.0", True),
        ("3.3.27", False),
        ("4.0.0", True),
        ("3.5.6-rc.1", False),
        ("", False),
    ],
)
def test_versions_that_lose_data_are_known(version: str, is_good: bool) -> None:
    assert _is_good(version) == is_good


def test_a_skew_is_known_to_the_second() -> None:
    at_s = 1_700_000_000.0  # 22:13:20
    date = "Tue, 14 Nov 2023 22:13:20 GMT"
    assert _skew_s(date, at_s + 0.5) == 0
    assert _skew_s(date, at_s - 99.5) == 100
    assert _skew_s(None, at_s) is None
    assert _skew_s("yesterday", at_s) is None
    assert _skew_s("Tue, 14 Nov 2023 22:13:20 -99999999999999999999", at_s) is None
