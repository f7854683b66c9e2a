"""A certificate that is renewed, and one that nobody renews."""

import asyncio
import errno
import logging
import os
import shutil
import ssl
import subprocess

import pytest
from hand_clock import HandClock
from raw_http import RawClient, get
from running_proxy import AT_ONCE, RunningProxy

from neuron_di import clock
from neuron_di.clock import use_clock
from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import server
from neuron_di_proxy.certificate import certificate_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make(folder, name, *, days=90, use="serverAuth", key="key.pem"):
    """A certificate of this name, whose time ends in `days` days; its key is made if need be."""
    if not (folder / key).exists():
        ec = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
        openssl(folder, "genpkey", *ec, "-out", key)
    openssl(folder, "req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", "req.pem")
    (folder / "extensions").write_text(f"subjectAltName=DNS:{name}\nextendedKeyUsage={use}\n")
    how = ("-in", "req.pem", "-key", key, "-extfile", "extensions", "-days", str(days))
    openssl(folder, "x509", "-req", *how, "-out", "cert.pem")


def front_of(folder):
    return FrontOptions(tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"))


def no_checks():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def name_shown(address):
    """The certificate's, as a client sees it that connects now."""
    async with RawClient(address, no_checks()) as raw:
        raw.send(get("/health"))
        assert (await raw.response()).status == 200
        shown = raw.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return next(name for name in (b"first.test", b"second.test") if name in shown)


async def said(caplog, event):
    """Until the log has it."""
    async with asyncio.timeout(20):
        while event not in caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def serving(playing, stack, tmp_path, monkeypatch, caplog):
    """A proxy that looks at its files all the time, with the certificate of `first.test`."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(server, "LOOK_INTERVAL_S", 0.02)
    make(tmp_path, "first.test")
    config = ProxyOptions(limits=AT_ONCE, front=front_of(tmp_path))
    return await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))


async def test_a_renewed_certificate_is_shown_without_a_restart(serving, tmp_path, caplog):
    async with RawClient(serving.address, no_checks()) as before:
        assert await name_shown(serving.address) == b"first.test"
        make(tmp_path, "second.test")
        await said(caplog, "certificate_read")
        assert await name_shown(serving.address) == b"second.test"
        before.send(get("/health"))
        assert (await before.response()).status == 200


async def test_while_the_files_do_not_fit_the_last_good_ones_stay(serving, tmp_path, caplog):
    """As between the two writes of a renewal with another key."""
    (tmp_path / "key.pem").unlink()
    await said(caplog, "certificate_not_read")
    assert await name_shown(serving.address) == b"first.test"
    make(tmp_path, "second.test")
    await said(caplog, "certificate_read")
    assert await name_shown(serving.address) == b"second.test"


def test_why_the_files_are_not_read_is_said_once(tmp_path, caplog):
    make(tmp_path, "first.test")
    certificate = certificate_of(front_of(tmp_path))
    (tmp_path / "cert.pem").write_text("no certificate")
    for _ in range(3):
        certificate.look()
    assert caplog.messages == ["certificate_not_read"]


def test_files_that_could_not_be_opened_are_read_at_the_next_look(tmp_path, caplog, monkeypatch):
    """Though they are as they were: it was for want of descriptors, say."""
    make(tmp_path, "first.test")
    certificate = certificate_of(front_of(tmp_path))
    make(tmp_path, "second.test")

    def read_nothing(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", read_nothing)
        certificate.look()
    assert caplog.messages == ["certificate_not_read"]
    caplog.set_level(logging.INFO)
    certificate.look()
    assert caplog.messages[-1] == "certificate_read"


@pytest.mark.parametrize(
    ("days", "use", "reason"),
    [(-1, "serverAuth", "expired"), (9, "clientAuth", "purpose")],
)
def test_what_no_client_will_trust_is_told_at_the_start(tmp_path, caplog, days, use, reason):
    make(tmp_path, "first.test", days=days, use=use)
    certificate_of(front_of(tmp_path))
    assert caplog.messages == ["certificate_not_trusted"]
    assert reason in caplog.records[0].event_fields["reason"]


def test_one_that_ends_soon_is_told_once_a_day(tmp_path, caplog):
    make(tmp_path, "first.test", days=20)
    certificate = certificate_of(front_of(tmp_path))
    start_s = clock.unix_s()
    with use_clock(hand := HandClock(may_sleep=False)):
        hand.now_s += start_s - hand.unix_s()  # today
        for _ in range(24 * 22):
            hand.now_s += 3600
            certificate.look()
    told = [(record.message, record.event_fields.get("days")) for record in caplog.records]
    days = [("certificate_ends_soon", left) for left in range(13, -1, -1)]
    assert told[: len(days)] == days
    assert {message for message, _ in told[len(days) :]} == {"certificate_not_trusted"}


def test_one_with_time_left_is_no_news(tmp_path, caplog):
    make(tmp_path, "first.test", days=60)
    certificate_of(front_of(tmp_path)).look()
    assert caplog.messages == []
