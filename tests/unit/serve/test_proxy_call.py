"""What the commands that ask a proxy are told of addresses, keys and servers that are none."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from neuron_di import admin_orders, proxy_answers
from neuron_di.admin_orders import give_order
from neuron_di.bench.client import HttpClient
from neuron_di.cli import main
from neuron_di.errors import ConfigError, PeerGone
from neuron_di.proxy_answers import ask
from neuron_di.proxy_call import check_key, no_answer, other_status

SAYS = {
    "ssh": b"SSH-2.0-OpenSSH_9\r\n",
    "tls": b"\x15\x03\x03\x00\x02\x02\x46",  # an alert
    "short": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
}


@pytest.fixture
def address() -> Iterator[tuple[str, list[bytes]]]:
    """Of a server, and what it says to whoever connects: its pieces, one each 50 ms."""
    says: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.recv(4096)
                        for piece in says:
                            connection.sendall(piece)
                            time.sleep(0.05)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):  # else what was not read would reset it
                            pass
                    except OSError:  # who asked has gone
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", says
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def order(url: str, key: str | None = None) -> None:
    list(give_order(url, "/admin/drain", {}, key))


@pytest.mark.parametrize(
    ("number", "words", "mend"),
    [
        (10, "certificate has expired", "renew it"),
        (62, "Hostname mismatch, certificate is not valid for 'x'.", "name the proxy as"),
        (18, "self-signed certificate", "SSL_CERT_FILE"),
    ],
)
def test_a_certificate_is_mended_by_what_is_wrong_with_it(
    number: int, words: str, mend: str
) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = number, words
    said = no_answer("https://x:8443", error).message
    assert words.rstrip(".") in said
    assert mend in said
    assert ("SSL_CERT_FILE" in said) == (number == 18)


def test_what_a_proxy_says_commands_no_terminal(
    address: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, says = address
    body = b'{"error": {"message": "no \\u001b[2J"}}'
    says.append(b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert main(["drain", "decode-0", "--url", url]) == 1
    assert capsys.readouterr().err == "neuron-di: no ?[2J\n"


def status(url: str, key: str | None = None) -> None:
    ask(url, "/status", key)


@pytest.mark.parametrize("command", [order, status])
@pytest.mark.parametrize("body", [b"", b'{"error": {"message": "no", "code": "not_found"}}'])
def test_a_path_too_much_is_told_as_one(
    address: tuple[str, list[bytes]], command: Callable[[str], None], body: bytes
) -> None:
    url, says = address
    says.append(b"HTTP/1.1 404 Not\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    with pytest.raises(PeerGone, match="status 404: give the proxy's address, without /v1"):
        command(url)


@pytest.mark.parametrize("command", [order, status, HttpClient])
@pytest.mark.parametrize(
    "url",
    [
        "ftp://here",
        "here:80",
        "http://127.0.0.1:abc",
        "http://a b",
        "http://[::1",
        "http://x..y:1",
        "http://",
        "http://a:1\r\n",
        "http://a/?x=1",
        "http://secret@a",
        "http://ops:secret@a:x",
        "ftp://ops:secret@a",
        "http://ops:secret@[::1",
    ],
)
def test_what_is_no_address_is_said_before_anything_is_sent(command, url):
    with pytest.raises(ConfigError, match="--url") as caught:
        command(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("command", [order, status, HttpClient])
@pytest.mark.parametrize(
    "key", ["secret\r", "secret\n", "secr\u00e9t", "secret\u4f60", "secret\x00"]
)
def test_a_key_that_no_header_can_carry_is_not_shown(command, key):
    with pytest.raises(ConfigError, match="no header can carry") as caught:
        command("http://127.0.0.1:1", key)
    assert "secr" not in caught.value.message
    check_key("ndi-0123-abc")
    check_key(None)


@pytest.mark.parametrize("command", [order, status])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("ssh", "no HTTP server"), ("tls", "speaks TLS: https://"), ("short", "broke its")],
)
def test_what_is_no_proxy_is_told_in_a_line(address, command, kind, words):
    url, says = address
    says.append(SAYS[kind])
    if (command, kind) == (order, "short"):
        words = "broke its answer off|not a neuron-di proxy"
    with pytest.raises(Exception, match=words) as caught:
        command(url)
    assert isinstance(caught.value, PeerGone) or command is order


def test_who_gave_an_order_to_a_proxy_that_was_killed_hears_where_to_ask(address):
    url, says = address
    line = b'{"phase": "drained"}\n'
    says += [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    says += [b"%x\r\n%b\r\n" % (len(line), line)]
    with pytest.raises(PeerGone, match="broke its answer off: ask `neuron-di status`"):
        order(url)


@pytest.mark.parametrize("command", [order, status])
def test_an_answer_that_never_ends_has_a_deadline(address, monkeypatch, command):
    url, says = address
    monkeypatch.setattr(proxy_answers, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(admin_orders, "LINE_TIMEOUT_S", 0.3)
    says += [b"HTTP/1.1 200 OK\r\n\r\n", *[b" "] * 200]
    with pytest.raises(PeerGone, match="timed out"):
        command(url)


@pytest.mark.parametrize("command", [order, status])
def test_an_answer_without_an_end_is_bounded(address, monkeypatch, command):
    url, says = address
    monkeypatch.setattr(proxy_answers, "ANSWER_BYTES_MAX", 1000)
    monkeypatch.setattr(admin_orders, "LINE_BYTES_MAX", 1000)
    says += [b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 2000]
    with pytest.raises(Exception, match="without an end"):
        command(url)


def test_an_http_proxy_in_between_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is not our proxy's word, and nobody would look for it there."""
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://127.0.0.1:1"})
    monkeypatch.setenv("no_proxy", "10.0.0.7")
    refused = ConnectionRefusedError(111, "Connection refused")
    words = no_answer("http://10.0.0.5:8000", refused).message
    assert words.endswith(
        "refused, by way of the HTTP proxy of http_proxy: no_proxy takes hosts out"
    )
    assert "by way of the HTTP proxy" in other_status("http://10.0.0.5:8000", 503).message
    for url in ("http://10.0.0.7:8000", "https://10.0.0.5:8000"):
        assert no_answer(url, refused).message == f"no proxy answers at {url}: Connection refused"
