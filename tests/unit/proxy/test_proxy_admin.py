"""Orders as a proxy takes them: who may give them, and what is refused before a worker is asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from key_files import write_key_file
from quart.typing import ResponseTypes
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import make_record

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import app
from neuron_di_proxy.admin import Admin, Lines
from neuron_di_proxy.admin_order import AdminLine, NotHere, check_sender
from neuron_di_proxy.key_file import KeyRecord, make_key


@pytest.fixture
async def proxy() -> AsyncIterator[RunningProxy]:
    records = [make_record("p", "prefill", 1), make_record("d", "decode", 2)]
    async with RunningProxy(ProxyOptions(limits=AT_ONCE), records) as proxy:
        yield proxy


async def post(proxy: RunningProxy, path: str, body: bytes, **headers: str) -> tuple[int, dict]:
    headers = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    async with proxy.http.post(path, data=body, headers=headers) as response:
        document: dict = msgspec.json.decode(await response.read())
        return response.status, document.get("error", document)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/admin/drain", b'{"worker": "x"}', 404, "worker_not_found"),
        ("/admin/drain", b'{"worker": "d"}', 409, "last_worker"),
        ("/admin/drain", b'{"worker": "d", "force": true}', 502, "peer_gone"),
        ("/admin/drain", b'{"worker": "d", "timeout_s": -1}', 400, "invalid_request"),
        ("/admin/drain", b'{"worker": "d", "more": 1}', 400, "invalid_request"),
        ("/admin/drain", b'{"worker": "../d"}', 400, "invalid_request"),
        ("/admin/drain", b"nothing", 400, "invalid_request"),
        ("/admin/drain", b'{"worker": "' + b"d" * 5000 + b'"}', 413, "request_too_large"),
        ("/admin/role", b'{"worker": "p", "role": "decode"}', 409, "last_worker"),
        ("/admin/role", b'{"worker": "p", "role": "king"}', 400, "invalid_request"),
        ("/admin/role", b'{"worker": "p", "role": "prefill"}', 400, "invalid_request"),
        ("/admin/role", b'{"worker": "p"}', 400, "invalid_request"),
    ],
)
async def test_what_is_refused(
    proxy: RunningProxy, path: str, body: bytes, status: int, code: str
) -> None:
    answered, error = await post(proxy, path, body)
    assert (answered, error["code"]) == (status, code)


async def test_a_name_that_no_worker_can_have_is_refused_in_words(proxy: RunningProxy) -> None:
    _, error = await post(proxy, "/admin/drain", b'{"worker": ""}')
    assert error["message"] == "`worker` must match [A-Za-z0-9._-]{1,64}"
    assert error["param"] == "worker"


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_foreign_web_page_cannot_order(proxy: RunningProxy, media_type: str) -> None:
    """A browser sends these without asking us, and nothing else."""
    status, error = await post(proxy, "/admin/drain", b'{"worker": "d"}', Content_Type=media_type)
    assert (status, error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("takes_hot", [True, False])
async def test_without_keys_an_order_comes_from_this_machine_and_no_page(takes_hot: bool) -> None:
    """A page may have made its own name mean this machine: then Host says that name."""
    config = ProxyOptions(limits=AT_ONCE)
    async with RunningProxy(config, [], takes_hot=takes_hot) as proxy:
        for headers, is_taken in (
            ({}, True),
            ({"Host": "localhost"}, True),
            ({"Host": "LOCALHOST:8000"}, True),
            ({"Host": "[::1]:8000"}, True),
            ({"Host": "10.0.0.7:8000"}, True),
            ({"Host": "evil.example"}, False),
            ({"Host": "localhost.evil.example:8000"}, False),
            ({"Host": "[evil]:8000"}, False),
            ({"Origin": "http://127.0.0.1:8000"}, False),
            ({"Origin": "null"}, False),
        ):
            for path in ("/admin/drain", "/admin/role"):
                body = b'{"worker": "x", "role": "both"}' if "role" in path else b'{"worker": "x"}'
                status, error = await post(proxy, path, body, **headers)
                wanted = (404, "worker_not_found") if is_taken else (403, "order_not_taken")
                assert (status, error["code"]) == wanted, headers


@pytest.mark.parametrize(
    ("address", "is_taken"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("192.0.2.1", False),
        ("", False),
    ],
)
def test_who_may_order_without_a_key(address: str, is_taken: bool) -> None:
    with nullcontext() if is_taken else pytest.raises(NotHere, match=r"loopback.*--api-keys"):
        check_sender({"host": "127.0.0.1:8000"}, address)


async def test_an_order_that_is_given_up_before_its_first_line_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, proxy: RunningProxy
) -> None:
    """The client left when the order had been taken, and nothing of it was sent."""
    ended, may_answer, is_asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    kept: list[Lines] = []  # or the collector of garbage would end it

    def drain(*_: object) -> Lines:
        kept.append(lines())
        return kept[-1]

    async def lines() -> Lines:
        try:
            yield AdminLine(phase="draining")
        finally:
            ended.set()

    async def held(response: ResponseTypes) -> ResponseTypes:
        is_asked.set()
        await may_answer.wait()
        return response

    monkeypatch.setattr(Admin, "drain", drain)
    monkeypatch.setattr(app, "_echo_id", held)
    async with RunningProxy(ProxyOptions(limits=AT_ONCE), []) as other:
        asking = asyncio.create_task(post(other, "/admin/drain", b'{"worker": "d"}'))
        await is_asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(10.0):
            await ended.wait()


async def test_orders_are_for_operators(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (tenant_id, tenant, digest), (operator_id, operator, other) = make_key(), make_key()
    records = {
        tenant_id: KeyRecord(tenant="one", sha256=digest),
        operator_id: KeyRecord(tenant="op", sha256=other, operator=True),
    }
    write_key_file(path, records)
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    async with RunningProxy(config, []) as proxy:
        for order in ("/admin/drain", "/admin/role"):
            for headers, status, code in (
                ({}, 401, "invalid_api_key"),
                ({"Authorization": f"Bearer {tenant}"}, 403, "permission_denied"),
            ):
                answered, error = await post(proxy, order, b"{}", **headers)
                assert (answered, error["code"]) == (status, code)
        body = b'{"worker": "x"}'
        bearer = {"Authorization": f"Bearer {operator}"}
        assert (await post(proxy, "/admin/drain", body, **bearer))[0] == 404
