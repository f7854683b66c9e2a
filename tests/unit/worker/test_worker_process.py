"""What a worker refuses before it loads anything."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager

import pytest

from neuron_di.config import (
    EngineOptions,
    EtcdOptions,
    HandOverOptions,
    TransferOptions,
    WorkerOptions,
)
from neuron_di.errors import CheckpointError, ConfigError, PeerRefused, PeerTimeout
from neuron_di.worker import load_model, process, run_worker
from neuron_di.worker.orders import RoleImpossible
from neuron_di.worker.server import bind


@pytest.mark.parametrize("key", ["", "wrong", "~" * 40, "%" * 40, "a" * 41, "\u00e4" * 40])
def test_a_partners_key_that_cannot_be_one_is_refused(tmp_path, key):
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", static_peer_key=key)
    with pytest.raises(ConfigError, match="static-peer-key has 40 characters of Z85"):
        run_worker(options)


@pytest.mark.parametrize("flag", ["peer-silence-s", "kv-lease-s"])
def test_a_silence_shorter_than_two_heartbeats_is_refused(tmp_path, flag):
    limits = HandOverOptions(heartbeat_s=2.0, **{flag.replace("-", "_"): 3.0})
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", hand_over=limits)
    with pytest.raises(ConfigError, match=f"{flag} 3 is less than two heartbeats"):
        run_worker(options)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_where_others_reach_it_a_worker_starts_only_on_an_operators_word(tmp_path, host):
    none = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*--insecure"):
        run_worker(WorkerOptions(model=none, role="decode", host=host))
    with pytest.raises(CheckpointError):  # it came to the model
        run_worker(WorkerOptions(model=none, role="decode", host=host, insecure=True))


def test_a_name_that_is_none_is_said_before_who_could_reach_it(tmp_path):
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", host="x" * 64)
    with pytest.raises(ConfigError, match=r"cannot listen on x+: .*address of this machine"):
        run_worker(options)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = WorkerOptions(model=str(tmp_path / "none"), role="decode", port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*another"):
            run_worker(options)


def test_a_taken_signal_port_is_said_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        none = str(tmp_path / "none")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*another"):
            run_worker(WorkerOptions(model=none, role="prefill", signal_port=port))


@pytest.mark.parametrize("field", ["transfer_port", "nrt_control_port"])
def test_a_port_that_is_needed_later_is_tried_at_the_start(tmp_path, field):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transfer = TransferOptions(**{field: port})
        none = str(tmp_path / "none")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*another"):
            run_worker(WorkerOptions(model=none, role="prefill", kv_transfer=transfer))
        with pytest.raises(CheckpointError):  # a decode worker does not listen there
            run_worker(WorkerOptions(model=none, role="decode", kv_transfer=transfer))


def test_an_address_for_kv_that_is_not_this_machines_is_said_at_the_start(tmp_path):
    transfer = TransferOptions(transfer_host="192.0.2.77")
    none = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77"):
        run_worker(WorkerOptions(model=none, role="prefill", kv_transfer=transfer))


@pytest.mark.parametrize("core", [1_000_000, 10**30])
def test_a_core_that_is_not_there_is_refused_with_those_that_are(tmp_path, core):
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", core=core)
    with pytest.raises(ConfigError, match=rf"to core {core}: it may run on \d"):
        run_worker(options)


@pytest.mark.parametrize(
    ("host", "transfer_host", "words"),
    [
        ("127.0.0.1", None, r"port \d+ is given twice: .*one of its own"),
        ("127.0.0.1", "127.0.0.1", r"port \d+ is given twice: .*one of its own"),
        ("0.0.0.0", "127.0.0.1", r"cannot listen on 127.0.0.1:\d+: .*in use"),
    ],
)
def test_two_ports_of_one_worker_are_not_the_same(tmp_path, host, transfer_host, words):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = WorkerOptions(
        model=str(tmp_path / "none"),
        role="prefill",
        host=host,
        insecure=True,
        port=port,
        kv_transfer=TransferOptions(transfer_host=transfer_host, transfer_port=port),
    )
    with pytest.raises(ConfigError, match=words):
        run_worker(options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_a_worker_just_starts(tmp_path, host):
    with pytest.raises(CheckpointError):
        run_worker(WorkerOptions(model=str(tmp_path / "none"), role="decode", host=host))


@pytest.mark.parametrize(
    ("host", "address"), [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "::1")]
)
def test_all_of_a_worker_listens_where_its_name_led_first(host, address):
    """Else its signal link may take the name's IPv6 address, where nobody is told to come."""
    with bind(host, 0) as sock:
        given = WorkerOptions(model="m", role="prefill", host=host)
        assert process._with_addresses(given, sock).host == address


@pytest.mark.parametrize(("ttl_s", "keep_s"), [(5.0, 30.0), (60.0, 180.0)])
async def test_peers_are_kept_as_long_as_the_proxy_keeps_them(monkeypatch, ttl_s, keep_s):
    """Where leases last for long, a peer's key may be gone for long while it lives."""
    asked = []

    @asynccontextmanager
    async def following(*_, keep_s, **__):
        asked.append(keep_s)
        yield

    class Unannounced:
        async def grant(self, ttl_s):
            raise PeerTimeout("away")

        def record(self):
            raise AssertionError("nothing was granted")

    monkeypatch.setattr(process, "following_peers", following)
    etcd = EtcdOptions(etcd=("127.0.0.1:1",), etcd_ttl_s=ttl_s)
    options = WorkerOptions(model="none", role="decode", etcd=etcd)
    nobody = Unannounced()
    async with process._Process(options, None, None, nobody).announced(nobody):
        pass
    assert asked == [keep_s]


async def test_no_role_is_taken_while_the_registry_takes_no_record(monkeypatch):
    """As of an etcd without space: in its role the worker is known, in another nobody would be."""

    @asynccontextmanager
    async def following(*_, **__):
        yield

    class Full:
        async def grant(self, ttl_s):
            raise PeerRefused("no space left")

        def record(self):
            raise AssertionError("nothing was granted")

    monkeypatch.setattr(process, "following_peers", following)
    monkeypatch.setattr(process, "why_impossible", lambda *_: "")
    full = Full()
    own = process._Process(WorkerOptions(model="none", role="decode"), None, None, full)
    own.check_role("prefill")
    async with own.announced(full) as announcer:
        own.check_role("prefill")
        async with asyncio.timeout(30):
            while not announcer.trouble():  # noqa: ASYNC110 - it is soon
                await asyncio.sleep(0.01)
        with pytest.raises(
            RoleImpossible, match="could not tell the registry of another role: no space left"
        ):
            own.check_role("prefill")
    own.check_role("prefill")  # that worker has ended


async def test_a_worker_has_what_grammars_need_before_it_serves(llama_folder):
    """Made for the first one that is asked for, it would stop every stream of the process."""
    engine = EngineOptions(num_blocks=8, threads=1)
    options = WorkerOptions(model=str(llama_folder), role="both", engine=engine)
    model = load_model(options.model, None, "both", engine)
    worker = await process._Process(options, model, None, None).assemble("both")
    try:
        assert "for_grammars" in vars(worker.prompts.rules_of.__self__._maker._words)
    finally:
        await worker.close()


@pytest.mark.parametrize("lacking", ["engine", "rules"])
async def test_what_gets_no_thread_leaves_its_ports_to_the_next_try(
    llama_folder, monkeypatch, lacking
):
    """As where a worker that could not take another role takes its old one again, and later that
    one after all."""
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    engine = EngineOptions(num_blocks=8, threads=1)
    options = WorkerOptions(
        model=str(llama_folder), role="prefill", engine=engine, signal_port=port
    )
    model = load_model(options.model, None, "prefill", engine)
    own, start = process._Process(options, model, None, None), threading.Thread.start

    def start_other(thread):
        if thread.name.startswith(lacking):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_other)
        with pytest.raises(RuntimeError, match="new thread"):
            await own.assemble("prefill")
    worker = await own.assemble("prefill")
    assert worker.prefill.signal_port == port
    await worker.close()
