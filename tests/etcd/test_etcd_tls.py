"""Certificates for etcd: whose are taken, and what becomes of those that are renewed."""

import asyncio
import shutil

import pytest
from etcd_kit import DEADLINE_S, certificates, running_etcd
from watching import until

from neuron_di.config import EtcdOptions
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.failures import PermissionDenied
from neuron_di.etcd.security import security_of

OURS = b"/neuron-di/workers/decode/127.0.0.1/4000"


async def test_tls_wants_our_certificate_and_theirs():
    async with running_etcd(tls=True) as etcd:
        pem = certificates()
        etcd.enable_users()  # the certificate's common name is a user
        async with EtcdClient(etcd.addresses, pem.security()) as client:
            await client.put(OURS, b"one")
            with pytest.raises(PermissionDenied, match=r"docs/etcd\.md"):
                await client.put(b"/else", b"")
            assert client.num_authentications == 0
        stranger, not_theirs = pem.security("stranger"), pem.believing("stranger", None)
        for security in (None, pem.security(None), stranger, not_theirs):
            async with EtcdClient(etcd.addresses, security, call_timeout_s=0.5) as client:
                with pytest.raises((PeerGone, PeerTimeout)):
                    await client.get(OURS)


async def test_certificates_that_were_renewed_count_once_they_fit_each_other(tmp_path, caplog):
    """For calls, too, that have tried the old ones in vain all the time."""
    pem = certificates()

    def copy(name: str, to: str) -> None:
        shutil.copy(pem.path(name), tmp_path / f"{to}.new")
        (tmp_path / f"{to}.new").replace(tmp_path / to)

    copy("ca.pem", "ca.pem")
    copy("stranger.pem", "own.pem")
    copy("stranger.key", "own.key")
    async with running_etcd(tls=True) as etcd:
        options = EtcdOptions(
            etcd=tuple(etcd.addresses),
            etcd_ca=str(tmp_path / "ca.pem"),
            etcd_cert=str(tmp_path / "own.pem"),
            etcd_key=str(tmp_path / "own.key"),
        )
        client = EtcdClient(etcd.addresses, security_of(options), call_timeout_s=DEADLINE_S)
        async with client, asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(client.get(OURS)) for _ in range(20)]
            copy("worker.pem", "own.pem")
            await until(lambda: "certificate_not_read" in caplog.messages)
            num_attempts = client.num_attempts
            await until(lambda: client.num_attempts > num_attempts + 2 * len(asked))
            assert not any(task.done() for task in asked)
            copy("worker.key", "own.key")
        assert [task.result() for task in asked] == [None] * len(asked)
    assert caplog.messages.count("certificate_not_read") == 1
