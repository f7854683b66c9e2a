"""TLS on the data connections."""

import contextlib
import logging
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL, WAIT_S, hostile_decode, runs_of, tcp_pair, wait

from neuron_di.clock import Deadline
from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError, PeerError, PeerRefused, PeerTimeout
from neuron_di.kv import KvPool
from neuron_di.transfer.tcp_engine import TcpEngine, TcpTimes
from neuron_di.transfer.tcp_frames import WANT, Frame
from neuron_di.transfer.tcp_listener import Arrival
from neuron_di.transfer.tcp_stream import TlsStream
from neuron_di.transfer.tcp_tls import open_tls
from neuron_di.types import Incarnation

Certificates = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    """The options of a worker with this authority, `one` or `other`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path_factory.mktemp("pem")

    def make(name: str, *signed: str) -> None:
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
        command = ["openssl", "req", "-x509", *new_key, *files, "-subj", f"/CN={name}", *signed]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    for ca in ("one", "other"):
        make(ca)
        make(f"{ca}-worker", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key")

    def options(ca: str, trusted: str | None = None) -> dict[str, str]:
        return {
            "transfer_tls_cert": str(folder / f"{ca}-worker.pem"),
            "transfer_tls_key": str(folder / f"{ca}-worker.key"),
            "transfer_tls_ca": str(folder / f"{trusted or ca}.pem"),
        }

    return options


def test_a_key_with_a_password_is_refused_and_not_asked_for(certificates, tmp_path):
    files = certificates("one")
    key = files["transfer_tls_key"]
    files["transfer_tls_key"] = str(tmp_path / "encrypted.key")
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out"]
    subprocess.run([*command, files["transfer_tls_key"]], check=True, capture_output=True)
    program = (
        "from neuron_di.config import TransferOptions\n"
        "from neuron_di.transfer.tcp_tls import open_tls\n"
        f"open_tls(TransferOptions(**{files!r}))\n"
    )
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", program])
    says = b""
    screen = os.fdopen(terminal, "rb", buffering=0)
    with screen, contextlib.suppress(OSError):  # of a terminal that nobody has open any more
        while b"pass phrase" not in says and (some := screen.read(4096)):
            says += some
    os.waitpid(child, 0)
    assert b"without a password" in says, says.decode()


@pytest.mark.parametrize("streams", [1, 3])
def test_kv_arrives_encrypted_over_each_stream(certificates, streams):
    with tcp_pair(2048, transfer_streams=streams, **certificates("one")) as pair:
        assert pair.decode.local_region(PREFILL).is_tls
        for receive in (pair.whole(), pair.whole()):
            pair.received[:] = 0xEE
            receiving, sending = pair.receive(receive), pair.send(receive)
            assert (wait(sending), wait(receiving)) == (None, None)
            assert pair.has_arrived(receive)
        unmatched = pair.whole()
        token = pair.receive(unmatched)
        pair.decode.cancel(PREFILL, unmatched.tag)
        assert wait(token) is not None
        assert pair.moves()


def test_whoever_reads_slowly_does_not_keep_the_blocks_for_long(certificates):
    """Though all that it reads is one run, which OpenSSL is given at once."""
    options = certificates("one")
    with (
        tcp_pair(8192, times=TcpTimes(proof_s=WAIT_S, send_s=0.3), **options) as pair,
        hostile_decode(pair, open_tls(TransferOptions(**options)).latest()) as sock,
    ):
        total = len(pair.sent)
        receive = pair.receive_of(runs_of([0], [0], [total]))
        sending = pair.send(receive)
        sock.sendall(Frame(WANT, receive.tag, total, 0, total).pack())
        pause, num_read = threading.Event(), 0
        while not sending.is_done() and num_read < total // 2:  # never silent, 2 MB/s at most
            num_read += len(sock.recv(1 << 16))
            pause.wait(0.01)
        assert isinstance(wait(sending), PeerTimeout)
        assert num_read < total // 2


@pytest.mark.parametrize(
    ("usage", "days", "words"),
    [
        ("clientAuth", 2, "purpose"),
        ("serverAuth", 2, "purpose"),
        ("serverAuth,clientAuth", -1, "expired"),
        ("serverAuth,clientAuth", 2, ""),
    ],
)
def test_a_certificate_that_no_peer_would_take_is_refused_at_the_start(
    certificates, tmp_path, usage, days, words
):
    files = certificates("one")
    ca, cert = Path(files["transfer_tls_ca"]), tmp_path / "cert.pem"
    (tmp_path / "extensions").write_text(f"extendedKeyUsage={usage}\n")
    key = files["transfer_tls_key"]
    asked = ("openssl", "req", "-new", "-key", key, "-subj", "/CN=worker", "-out", "request")
    signed = ("openssl", "x509", "-req", "-in", "request", "-CA", str(ca), "-CAkey",
              str(ca.with_suffix(".key")), "-set_serial", "9", "-days", str(days),
              "-extfile", "extensions", "-out", str(cert))  # fmt: skip
    for command in (asked, signed):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    options = TransferOptions(**{**files, "transfer_tls_cert": str(cert)})
    if not words:
        assert open_tls(options) is not None
        return
    with pytest.raises(ConfigError, match=rf"--transfer-tls-cert: .*{words}"):
        open_tls(options)


def test_a_certificate_that_is_not_of_the_authority_is_refused_at_the_start(certificates):
    with pytest.raises(ConfigError, match="issuer"):
        open_tls(TransferOptions(**certificates("one", "other")))


def test_a_certificate_of_another_authority_is_refused(certificates):
    options = TransferOptions(**certificates("other"))
    with (
        tcp_pair(**certificates("one")) as pair,
        closing(KvPool.create(LAYOUT, 1, Incarnation("x"))) as pool,
        closing(TcpEngine(pool, options)) as stranger,
    ):
        pair.prefill.accept(Incarnation("x"), stranger.local_region(PREFILL), LAYOUT)
        with pytest.raises(PeerError):
            stranger.connect(PREFILL, pair.prefill.local_region(Incarnation("x")), LAYOUT)
        assert pair.moves()


def test_what_is_wrong_with_tls_is_said_at_both_ends(certificates, caplog):
    options = TransferOptions(**certificates("other"))
    with (
        tcp_pair(**certificates("one"), is_connected=False) as pair,
        closing(KvPool.create(LAYOUT, 1, Incarnation("x"))) as pool,
        closing(TcpEngine(pool, options)) as stranger,
    ):
        pair.prefill.accept(Incarnation("x"), stranger.local_region(PREFILL), LAYOUT)
        with pytest.raises(PeerError, match=r"^TLS with its data port failed.*verify"):
            stranger.connect(PREFILL, pair.prefill.local_region(Incarnation("x")), LAYOUT)
    (refused,) = [r for r in caplog.records if r.message == "data_connection_refused"]
    assert refused.event_fields["reason"].startswith("TLS with it failed")


def test_one_end_with_tls_and_one_without_do_not_connect(certificates):
    with (
        tcp_pair(is_connected=False) as pair,
        closing(KvPool.create(LAYOUT, 1, Incarnation("x"))) as pool,
        closing(TcpEngine(pool, TransferOptions(**certificates("one")))) as other,
    ):
        with pytest.raises(PeerRefused):
            other.accept(DECODE, pair.decode.local_region(PREFILL), LAYOUT)
        with pytest.raises(PeerRefused):
            pair.prefill.accept(Incarnation("x"), other.local_region(DECODE), LAYOUT)


def test_tls_options_go_together_and_name_files(tmp_path):
    with pytest.raises(ConfigError, match="go together"):
        TransferOptions(transfer_tls_cert="a")
    missing = str(tmp_path / "none.pem")
    options = TransferOptions(
        transfer_tls_cert=missing, transfer_tls_key=missing, transfer_tls_ca=missing
    )
    with closing(KvPool.create(LAYOUT, 1, PREFILL)) as pool, pytest.raises(ConfigError):
        TcpEngine(pool, options)


def test_renewed_certificates_count_from_the_next_connection_on(certificates, tmp_path, caplog):
    """Also where the authority is another one, and only once all files fit each other."""
    caplog.set_level(logging.INFO)
    own = {option: str(tmp_path / Path(file).name) for option, file in certificates("one").items()}

    def renew(ca: str, *parts: str) -> None:
        for option, file in certificates(ca).items():
            if not parts or option.endswith(parts):
                fresh = Path(own[option] + ".new")
                shutil.copy(file, fresh)
                fresh.replace(own[option])

    renew("one")
    stranger = TransferOptions(**certificates("other"))
    with (
        tcp_pair(**own) as pair,
        closing(KvPool.create(LAYOUT, 1, Incarnation("x"))) as pool,
        closing(TcpEngine(pool, stranger)) as other,
    ):
        pair.prefill.accept(Incarnation("x"), other.local_region(PREFILL), LAYOUT)
        renew("other", "cert")  # the key is the old one still
        pair.connect()
        assert pair.moves()
        pair.connect()
        assert pair.moves()
        assert caplog.messages.count("certificate_not_read") == 2  # each end's, once
        with pytest.raises(PeerError):
            other.connect(PREFILL, pair.prefill.local_region(Incarnation("x")), LAYOUT)
        renew("other")
        other.connect(PREFILL, pair.prefill.local_region(Incarnation("x")), LAYOUT)
        assert pair.moves()  # over the connection that was there before
        pair.connect()
        assert pair.moves()
    assert caplog.messages.count("certificate_read") == 2  # each end's


def test_ending_a_connection_leaves_its_tls_to_the_thread_that_uses_it(certificates):
    """Else that thread would go on in the clear: KV to the network, ciphertext to the pool."""
    tls = open_tls(TransferOptions(**certificates("one"))).latest()
    num_bytes = 64 << 10
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname(), WAIT_S)
        accepted, _ = listener.accept()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(tls.server.wrap_socket, accepted, server_side=True)
        near = TlsStream(tls.client.wrap_socket(raw), WAIT_S)
        far_sock = serving.result(WAIT_S)
    far = TlsStream(far_sock, WAIT_S)
    sent, received = np.full(num_bytes, 65, np.uint8), np.full(num_bytes, 0xEE, np.uint8)
    row, rows = np.zeros(1, np.int64), np.array([num_bytes], np.int64)
    far.send_runs(b"", int(sent.ctypes.data), row, rows, Deadline.after(WAIT_S))
    near.shut()
    with contextlib.suppress(OSError):
        while True:
            near.receive_runs(int(received.ctypes.data), row, rows, Deadline.after(WAIT_S))
    assert ((received == 65) | (received == 0xEE)).all()
    arrival = Arrival(far_sock, "here", lambda _: None)
    arrival.shut()
    assert far_sock.version() == "TLSv1.3"
    for stream in (near, far):
        stream.close()


def test_a_connection_that_is_ended_during_its_handshake_is_ended():
    """The socket under TLS takes the other one's place only after the order to end it."""
    near, far = socket.socketpair()
    with near, far:
        detached = socket.socket()
        detached.close()
        arrival = Arrival(detached, "here", lambda _: None)
        arrival.shut()
        arrival.replace(near)
        far.settimeout(WAIT_S)
        assert far.recv(1) == b""
