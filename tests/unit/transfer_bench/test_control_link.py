import contextlib
import hmac
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_di.errors import PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.transfer_bench import control_link
from neuron_di.transfer_bench.control_link import ControlLink, make_key
from neuron_di.transfer_bench.messages import (
    FRAME_BYTES_MAX,
    Closed,
    Finish,
    Finished,
    to_measuring_decoder,
    to_serving_decoder,
)

KEY = "k" * 43
WAIT_S = 10.0


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def meet(listener, serving_key, measuring_key):
    """Both ends' links, or what each raised."""
    port = listener.getsockname()[1]

    def serve():
        sock, _ = listener.accept()
        return ControlLink.answer(sock, serving_key)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(serve), pool.submit(ControlLink.ask, "127.0.0.1", port, measuring_key)]
        return [end.exception() or end.result() for end in ends]


@pytest.fixture
def links(listener):
    ends = meet(listener, KEY, KEY)
    yield ends
    for end in ends:
        end.close()


def test_messages_go_both_ways_in_order(links):
    serving, measuring = links
    for number in range(3):
        measuring.send(Finish())
        assert serving.receive(to_serving_decoder, WAIT_S) == Finish()
        serving.send(Finished(cpu_s=number))
    for number in range(3):
        assert measuring.receive(to_measuring_decoder, WAIT_S) == Finished(cpu_s=number)


def test_keys_differ_and_are_long():
    assert len({make_key() for _ in range(50)}) == 50
    assert len(make_key()) >= control_link.KEY_CHARS_MIN


@pytest.mark.parametrize("key", ["l" * 43, "k" * 42, "k" * 44, ""])
def test_another_key_is_refused_at_both_ends(listener, key):
    serving, measuring = meet(listener, KEY, key)
    assert isinstance(serving, PeerRefused)
    assert isinstance(measuring, PeerRefused)


def test_who_does_not_have_the_key_cannot_serve(listener):
    """What listens there learns nothing from the client that it could use elsewhere."""
    port = listener.getsockname()[1]

    def impostor():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"NDIXFER1" + bytes(32))
            answer = sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(answer[32:])  # its own proof, sent back
            return answer

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(impostor)
        with pytest.raises(PeerRefused, match="does not have the key"):
            ControlLink.ask("127.0.0.1", port, KEY)
        assert KEY.encode() not in found.result(WAIT_S)


def test_something_else_that_listens_is_told_apart(listener):
    port = listener.getsockname()[1]

    def web_server():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + bytes(100))
            with contextlib.suppress(ConnectionError):
                sock.recv(1)

    thread = threading.Thread(target=web_server)
    thread.start()
    with pytest.raises(PeerRefused, match="no bench-transfer"):
        ControlLink.ask("127.0.0.1", port, KEY)
    thread.join()


def test_nobody_there_is_said():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerGone, match="nothing serves"):
        ControlLink.ask("127.0.0.1", port, KEY)


def test_who_says_nothing_is_not_waited_for(listener, monkeypatch):
    monkeypatch.setattr(control_link, "HELLO_TIMEOUT_S", 0.05)
    with socket.create_connection(listener.getsockname()):
        sock, _ = listener.accept()
        with pytest.raises(PeerTimeout):
            ControlLink.answer(sock, KEY)
    assert sock.fileno() == -1


def frame(link, message, *, number=None, direction=None, body=None):
    """What `link` would send, with some of it changed."""
    body = control_link.encode_msgpack(message) if body is None else body
    number = link._num_sent if number is None else number
    direction = link._mine if direction is None else direction
    proof = hmac.digest(link._key, direction + struct.pack("!Q", number) + body, "sha256")
    return struct.pack("!I", len(body)) + proof + body


def test_a_frame_that_was_changed_repeated_or_reflected_is_refused(links):
    serving, measuring = links
    right = frame(measuring, Finish())
    for wrong in (
        right[:-1] + bytes([right[-1] ^ 1]),
        frame(measuring, Finish(), number=1),
        frame(measuring, Finish(), direction=serving._mine),
    ):
        measuring._socket.sendall(wrong)
        with pytest.raises(RemoteProtocolError):
            serving.receive(to_serving_decoder, WAIT_S)
    measuring._socket.sendall(right)
    assert serving.receive(to_serving_decoder, WAIT_S) == Finish()
    measuring._socket.sendall(right)
    with pytest.raises(RemoteProtocolError):
        serving.receive(to_serving_decoder, WAIT_S)


def test_a_frame_that_is_too_large_is_refused_before_it_is_read(links):
    serving, measuring = links
    measuring._socket.sendall(struct.pack("!I", FRAME_BYTES_MAX + 1))
    with pytest.raises(RemoteProtocolError, match="a frame of"):
        serving.receive(to_serving_decoder, WAIT_S)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa4type\xa4nope", b"\x80", bytes(1000)])
def test_a_proven_frame_that_is_no_message_is_refused(links, body):
    serving, measuring = links
    measuring._socket.sendall(frame(measuring, Finish(), body=body))
    with pytest.raises(RemoteProtocolError):
        serving.receive(to_serving_decoder, WAIT_S)


def test_an_end_that_is_gone_or_silent_is_noticed(links):
    serving, measuring = links
    with pytest.raises(PeerTimeout):
        serving.receive(to_serving_decoder, 0.01)
    measuring.close()
    with pytest.raises(PeerGone):
        serving.receive(to_serving_decoder, WAIT_S)
    with pytest.raises(PeerGone):
        send_on(serving)


def send_on(link):
    """Until the kernel has noticed."""
    for _ in range(1000):
        link.send(Closed())


def test_a_name_that_no_host_can_have_is_said():
    with pytest.raises(PeerGone, match="nothing serves"):
        ControlLink.ask("a" * 70 + ".b", 9, KEY)
