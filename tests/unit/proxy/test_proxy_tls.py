"""TLS: what serves, and what is said of a certificate or key that cannot."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from dataclasses import replace
from itertools import islice

import pytest
from raw_http import DEADLINE_S, RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.errors import ConfigError
from neuron_di_proxy.certificate import certificate_of
from neuron_di_proxy.reply import EVENT_STREAM
from neuron_di_proxy.socket_reply import SocketReply
from neuron_di_proxy.token_lane import outlet_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")

STREAM = {"model": "tiny", "prompt": "hi", "stream": True}


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A folder with cert.pem and key.pem, another key, and an encrypted one."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    openssl(*new_key, "-out", "key.pem")
    openssl(*new_key, "-out", "other.pem")
    openssl(*new_key, "-aes-128-cbc", "-pass", "pass:secret", "-out", "locked.pem")
    san = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl("req", "-x509", "-key", "key.pem", "-days", "2", *san, "-out", "cert.pem")
    return folder


def config_with(folder, cert="cert.pem", key="key.pem"):
    names = {"tls_cert": cert, "tls_key": key}
    front = {name: None if each is None else str(folder / each) for name, each in names.items()}
    return ProxyOptions(limits=AT_ONCE, front=FrontOptions(**front))


def client_tls(folder, *alpn):
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


@pytest.fixture
async def secure(playing, stack, pem):
    return await stack.enter_async_context(
        RunningProxy(config_with(pem), playing.proxy.directory.records)
    )


async def test_requests_over_tls(secure, pem):
    async with RawClient(secure.address, client_tls(pem)) as raw:
        raw.send(post("/v1/completions", STREAM) * 2 + get("/health"))
        answers = [await raw.response() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert answers[1].body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_over_tls_ends_its_legs(cluster, stack, pem):
    proxy = await stack.enter_async_context(
        RunningProxy(config_with(pem), cluster.proxy.directory.records)
    )
    async with RawClient(proxy.address, client_tls(pem)) as raw:
        raw.send(post("/v1/completions", STREAM))
        prefill_leg = await cluster.prefill.next_leg()
        raw.writer.close()
        await prefill_leg.closed.wait()


async def test_http_2_where_tls_agrees_on_it(secure, pem):
    async with RawClient(secure.address, client_tls(pem, "h2", "http/1.1")) as raw:
        assert raw.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        raw.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        async with asyncio.timeout(10):
            frame = await raw.reader.readexactly(9)
        assert frame[3] == 4  # hypercorn's settings


async def test_a_client_without_tls_is_not_served(secure):
    async with RawClient(secure.address) as raw:
        raw.send(get("/health"))
        assert b"HTTP/1.1" not in await raw.end()


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("cert.pem", None, "give --tls-key too"),
        (None, "key.pem", "give --tls-cert too"),
        ("nothing.pem", "key.pem", "No such file"),
        ("cert.pem", "other.pem", "the key is that certificate's"),
        ("cert.pem", "locked.pem", "without a password"),
        ("key.pem", "key.pem", "PEM files"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(pem, cert, key, said):
    with pytest.raises(ConfigError, match=said):
        certificate_of(config_with(pem, cert, key).front)


def test_without_files_there_is_no_tls():
    assert certificate_of(FrontOptions()) is None


async def test_a_client_that_leaves_is_nothing_to_warn_of(secure, pem, caplog):
    """Whatever its workers say until that is noticed."""
    async with RawClient(secure.address, client_tls(pem)) as raw:
        transport = raw.writer.transport  # one end is as good as the other
        reply = SocketReply(transport, outlet_of(transport), is_chunked=True, closes=False)
        reply.begin(200, [EVENT_STREAM], length=None)
        transport.close()
        for _ in range(20):
            reply.write(b"data: x\n\n")
        reply.end()
    assert caplog.messages == []


async def test_who_does_not_speak_tls_yet_is_a_connection(stack, pem):
    """Or who opens some and says nothing would have all descriptors, those for workers too."""
    front = replace(config_with(pem).front, connections_max=2, header_timeout_s=1000)
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(front=front), []))
    silent = [await stack.enter_async_context(RawClient(proxy.address)) for _ in range(5)]
    ends = asyncio.as_completed([each.end() for each in silent])
    for end in islice(ends, 3):
        assert await end == b""


async def test_bytes_of_a_handshake_come_one_by_one(secure, pem):
    """And a first request right behind its last word."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_tls(pem).wrap_bio(theirs, ours, server_hostname="localhost")
    answer = b""
    async with RawClient(secure.address) as raw, asyncio.timeout(DEADLINE_S):
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        for byte in ours.read():
            raw.send(bytes([byte]))
            await asyncio.sleep(0)
        while not answer:
            theirs.write(await raw.reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                if tls.version() is None:
                    tls.do_handshake()
                    tls.write(get("/live"))
                answer += tls.read(65536)
            raw.send(ours.read())
    assert answer.startswith(b"HTTP/1.1 200")
