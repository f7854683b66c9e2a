"""Who makes room for another when no more connections may be open: who has rested for longest."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from contextlib import AsyncExitStack

import pytest
from h2_client import H2Client
from raw_http import RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import socket_rest

PATH = "/v1/completions"
WHOLE = {"model": "tiny", "prompt": "hi", "max_tokens": 2000}
PATIENCE_S = 30
NUM_TOKENS, SIZE = 150, 60_000  # more than sockets hold


async def say_much(leg):
    await leg.finish(
        *(token(index, "x" * SIZE) for index in range(1, NUM_TOKENS)), finished(NUM_TOKENS)
    )


async def proxy_with(stack, cluster, **front):
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(**front))
    proxy = await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))
    await proxy.http.close()  # its connection would be one of them
    return proxy


async def is_served(address, tls=None):
    """Whether one more connection is. A refused one ends without a word."""
    try:
        async with RawClient(address, tls) as raw:
            raw.send(get("/live", "Connection: close"))
            return (await raw.response()).status == 200
    except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLEOFError):
        return False


async def until_served(address):
    async with asyncio.timeout(PATIENCE_S):
        while not await is_served(address):
            pass


async def test_who_has_just_come_or_asked_is_not_ended_for_another(stack, playing, monkeypatch):
    """Its next request may be on the way. A while later it makes room."""
    monkeypatch.setattr(socket_rest, "QUIET_S", 3600.0)
    proxy = await proxy_with(stack, playing, connections_max=3)
    come, asked, asked_h2 = [
        await stack.enter_async_context(RawClient(proxy.address)) for _ in range(3)
    ]
    asked.send(get("/live"))
    assert (await asked.response()).status == 200
    client = H2Client(asked_h2)
    client.ask(1, "/live")
    await client.until_over(1)
    for _ in range(5):
        assert not await is_served(proxy.address)
    for raw in (come, asked):
        raw.send(post(PATH, WHOLE))
        assert (await raw.response()).status == 200
    client.ask(3, "/live")
    await client.until_over(3)
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    await until_served(proxy.address)


async def test_the_time_is_the_kernels(stack, playing):
    proxy = await proxy_with(stack, playing, connections_max=1)
    raw = await stack.enter_async_context(RawClient(proxy.address))
    raw.send(get("/live"))
    assert (await raw.response()).status == 200
    await until_served(proxy.address)
    assert await raw.reader.read() == b""


async def test_who_has_rested_for_longest_goes_first(stack, playing, monkeypatch):
    """Not who came first."""
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    proxy = await proxy_with(stack, playing, connections_max=4)
    raws = [await stack.enter_async_context(RawClient(proxy.address)) for _ in range(4)]
    for index in (3, 1, 2, 0, 3, 0):
        raws[index].send(get("/live"))
        assert (await raws[index].response()).status == 200
    await asyncio.sleep(0.3)  # until the kernel has said that all was received
    for index in (1, 2, 3, 0):
        one_more = await stack.enter_async_context(RawClient(proxy.address))
        one_more.send(get("/live"))
        assert (await one_more.response()).status == 200
        async with asyncio.timeout(PATIENCE_S):
            assert await raws[index].reader.read() == b""


async def test_who_is_ended_over_http2_is_told_goodbye(stack, playing, monkeypatch):
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    proxy = await proxy_with(stack, playing, connections_max=1)
    raw = await stack.enter_async_context(RawClient(proxy.address))
    client = H2Client(raw)
    client.ask(1, "/live")
    await client.until_over(1)
    await until_served(proxy.address)
    while await client.hear():
        pass
    assert client.has_goodbye


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path_factory.mktemp("pem")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += " -keyout key.pem -out cert.pem -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def security(request, pem):
    """Options of the front, and what a client needs."""
    if not request.param:
        return {}, None
    files = {"tls_cert": str(pem / "cert.pem"), "tls_key": str(pem / "key.pem")}
    return files, ssl.create_default_context(cafile=pem / "cert.pem")


async def slow_reader(stack, proxy, tls):
    """A client with a small buffer that has asked for much: its reader and writer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, proxy.address)
    name = "localhost" if tls else None
    reader, writer = await asyncio.open_connection(
        sock=sock, ssl=tls, server_hostname=name, limit=4096
    )
    stack.callback(end, writer)
    return reader, writer


def end(writer):
    writer.transport.abort()


async def test_who_still_reads_an_answer_is_not_ended(stack, playing, monkeypatch, security):
    """Neither for another nor for being idle: all is written, and not all is read."""
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    options, tls = security
    playing.decode.script = say_much
    proxy = await proxy_with(stack, playing, connections_max=1, keep_alive_s=0.2, **options)
    reader, writer = await slow_reader(stack, proxy, tls)
    writer.write(post(PATH, WHOLE))
    head = await reader.readuntil(b"\r\n\r\n")
    num_bytes = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    for _ in range(5):
        await asyncio.sleep(0.1)
        assert not await is_served(proxy.address, tls)
    async with asyncio.timeout(PATIENCE_S):
        body = await reader.readexactly(num_bytes)
    assert len(json.loads(body)["choices"][0]["text"]) > (NUM_TOKENS - 1) * SIZE


async def test_who_still_reads_an_answer_over_http2_is_not_ended(stack, playing, monkeypatch):
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    playing.decode.script = say_much
    proxy = await proxy_with(stack, playing, connections_max=1, keep_alive_s=0.2)
    async with AsyncExitStack() as own:
        raw = RawClient(proxy.address)
        raw.reader, raw.writer = await slow_reader(own, proxy, None)
        client = H2Client(raw)
        client.ask(1, PATH, json.dumps(WHOLE).encode())
        async with asyncio.timeout(PATIENCE_S):
            while 1 not in client.statuses:
                await client.hear(4096)
            for _ in range(5):
                await asyncio.sleep(0.1)
                assert not await is_served(proxy.address)
            await client.until_over(1)
    assert client.ended == {1}


async def test_a_request_of_which_a_part_has_come_is_not_ended(stack, playing, security):
    """Over TLS not even a byte of it is known before its record is whole."""
    options, tls = security
    proxy = await proxy_with(stack, playing, connections_max=1, **options)
    request = post(PATH, WHOLE | {"prompt": "x" * 15_000})
    if tls is None:
        raw = await stack.enter_async_context(RawClient(proxy.address))
        raw.send(request[:-10])
        assert not await is_served(proxy.address)
        raw.send(request[-10:])
        assert (await raw.response()).status == 200
        return
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    channel = tls.wrap_bio(coming, going, server_hostname="localhost")
    reader, writer = await asyncio.open_connection(*proxy.address)
    stack.callback(end, writer)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                channel.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(going.read())
                coming.write(await reader.read(65536))
        channel.write(request)
        record = going.read()
        writer.write(record[:-100])
        assert not await is_served(proxy.address, tls)
        writer.write(record[-100:])
        answer = b""
        while b"\r\n\r\n" not in answer:
            coming.write(await reader.read(65536))
            try:
                answer += channel.read(65536)
            except ssl.SSLWantReadError:
                continue
    assert answer.startswith(b"HTTP/1.1 200")
