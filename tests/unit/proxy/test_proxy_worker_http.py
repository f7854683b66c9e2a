"""Questions to workers over HTTP: connections are kept, and answers have a limit."""

import asyncio
import socket
import threading

import pytest
import uvloop
from aiohttp.client_proto import ResponseHandler

from neuron_di.clock import now_s
from neuron_di.errors import RemoteProtocolError
from neuron_di_proxy.static_directory import StaticDirectory
from neuron_di_proxy.worker_http import ask_worker, worker_session

BYTES_MAX = 1 << 16
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
UPGRADING = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
IN_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"


class Answering:
    """A server that answers every question with the same bytes. `answer` None: with nothing."""

    def __init__(self, answer=OK):
        self.answer = answer
        self.questions = []
        self.writers = []
        self._serving = []
        self.asked = asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/status"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.hang_up()
        await asyncio.gather(*self._serving)

    def hang_up(self):
        for writer in self.writers:
            writer.close()

    async def _serve(self, reader, writer):
        self.writers.append(writer)
        self._serving.append(asyncio.current_task())
        try:
            while True:
                self.questions.append(await reader.readuntil(b"\r\n\r\n"))
                self.asked.set()
                if self.answer is not None:
                    writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def server(stack):
    return await stack.enter_async_context(Answering())


@pytest.fixture
async def asker(stack):
    return await stack.enter_async_context(worker_session())


async def ask(session, server):
    async with asyncio.timeout(10):
        return await ask_worker(session, server.url, bytes_max=BYTES_MAX)


async def until(condition):
    end_s = now_s() + 10
    while not condition():
        assert now_s() < end_s, "it never came to hold"
        await asyncio.sleep(0.01)


async def test_one_connection_serves_all_questions(asker, server):
    for _ in range(3):
        assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 1
    assert all(each.startswith(b"GET /status HTTP/1.1\r\n") for each in server.questions)


@pytest.mark.parametrize(("answer", "num_connections"), [(OK, 1), (IN_CHUNKS, 1), (CLOSING, 2)])
async def test_an_answer_however_it_is_sent(asker, server, answer, num_connections):
    server.answer = answer
    for _ in range(2):
        assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == num_connections


async def test_a_connection_that_was_ended_while_idle_is_made_again(asker, server):
    await ask(asker, server)
    server.hang_up()
    for _ in range(2):
        assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 2


async def test_what_comes_unasked_ends_a_connection(asker, server):
    """Or it would be taken for the answer to the next question."""
    server.answer = OK + OK.replace(b"{}", b"[]")
    assert await ask(asker, server) == (200, b"{}")
    server.answer = OK
    assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 2


async def test_who_would_speak_another_protocol_is_asked_on_a_new_connection(asker, server):
    server.answer = UPGRADING
    assert (await ask(asker, server))[0] == 101
    server.answer = OK
    assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * BYTES_MAX,
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n" + b"x" * (BYTES_MAX + 1),
    ],
)
async def test_what_is_no_answer_is_refused(asker, server, answer):
    server.answer = answer
    with pytest.raises(RemoteProtocolError):
        await ask(asker, server)
    server.answer = OK
    assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 2


def test_who_never_comes_to_the_answer_keeps_the_loop_from_nothing_else(monkeypatch):
    num_bytes, most, num_continues = 0, 0, 100_000
    receive = ResponseHandler.data_received

    def count(handler, data):
        nonlocal num_bytes, most
        num_bytes += len(data)
        most = max(most, num_bytes)
        receive(handler, data)

    def flood(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(CONTINUE * num_continues + OK)

    async def ask_all(port):
        nonlocal num_bytes
        async with worker_session() as session:
            url = f"http://127.0.0.1:{port}/status"
            asking = asyncio.create_task(ask_worker(session, url, bytes_max=BYTES_MAX))
            while not asking.done():
                num_bytes = 0
                await asyncio.sleep(0)
            return asking.result()

    monkeypatch.setattr(ResponseHandler, "data_received", count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flooding = threading.Thread(target=flood, args=(listener,))
        flooding.start()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answer = runner.run(ask_all(listener.getsockname()[1]))
        flooding.join()
    assert answer == (200, b"{}")
    assert most < 512 << 10


async def test_nobody_there_and_no_name(asker, server):
    async with Answering() as gone:
        pass
    with pytest.raises(OSError, match=r"refused|Connect"):
        await ask(asker, gone)
    with pytest.raises(UnicodeError):
        await ask_worker(asker, f"http://{'x' * 64}é:1/status", bytes_max=BYTES_MAX)


async def test_a_question_that_is_given_up_ends_its_connection(asker, server):
    server.answer = None
    asking = asyncio.create_task(ask(asker, server))
    await server.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    server.answer = OK
    assert await ask(asker, server) == (200, b"{}")
    assert len(server.writers) == 2


async def test_a_static_directory_keeps_its_view_while_nothing_changes(cluster):
    def address(worker):
        return f"http://localhost:{worker.record.api_port}/"

    workers = cluster.prefill, cluster.decode
    async with StaticDirectory(tuple(address(each) for each in workers)) as directory:
        await until(lambda: len(directory.workers()) == len(workers))
        view = directory.workers()
        assert [(each.worker_id, each.host) for each in view] == [
            ("p1", "localhost"),
            ("d1", "localhost"),
        ]
        num_asked = cluster.prefill.num_asked
        await until(lambda: cluster.prefill.num_asked >= num_asked + 3)
        assert directory.workers() is view
        cluster.decode.restart()
        await until(lambda: directory.workers() is not view)
        assert directory.workers()[1].incarnation == cluster.decode.record.incarnation
